"""Whether the ranks of an attempt get on, by what they have shown so far of how long they may stand."""

from __future__ import annotations

from hpcddp.record import TYPE_CHECKING
from hpcddp.supervisor.rank_report import find_odd

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from hpcddp.runs.heartbeat import Beat
    from hpcddp.supervisor.rank_report import RankReport

#: Times as long as a step: the first one of an attempt compiles.
FIRST_STEP = 10
#: Others than a rank that has ended.
WAITING = "others wait for it in hpcddp's runtime"
#: Of a rank that does not say where it stands.
NOWHERE = "is one of them"
_SLOWER = 10  # times the longest time without a move so far
_BUSY = 10  # times as long, for ranks that stand and use the processor


class StuckDetector:
    """Of one attempt. `limit_s`: how long all ranks may make no step at least; 0: for ever."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._slowest_s = 0.0  # the longest time in which a rank neither moved nor used the processor
        self._longest_s = 0.0  # in which it did not move
        self._has_stepped = False  # more than once: the first step of an attempt compiles

    def note(self, one: RankReport, beat: Beat, now: float) -> None:
        """What this rank says of itself."""
        before = one.beat
        if beat.looks != before.looks:
            if one.has_left and beat.looks:  # the script has opened another runtime, whose first step compiles, too
                self._has_stepped = False
            one.looked = now
            one.has_left = not beat.looks
        touched = not beat.looks and before.touched not in {0, beat.touched}  # it was made at some time, too
        self._has_stepped |= touched and one.has_touched
        one.has_touched |= touched
        moved = beat.step != before.step or beat.moves != before.moves or touched
        used = beat.uses != before.uses
        if self._has_stepped and (moved or used):
            self._slowest_s = max(self._slowest_s, now - max(one.moved, one.used))
        if self._has_stepped and moved:
            self._longest_s = max(self._longest_s, now - one.moved)
        one.moved = now if moved else one.moved
        one.used = now if used else one.used
        if before.step and beat.step > before.step:
            self._has_stepped = True
        one.beat = beat

    def find_stuck(self, ranks: Collection[RankReport], now: float) -> tuple[list[RankReport], float, bool]:
        """Those that the others wait for, if no rank gets on, since when, and whether it is known that these are the
        ones; empty: some rank does."""
        there = [one for one in ranks if one.connection is not None and not one.is_held]
        told = [one for one in there if one.beat.looks or one.has_touched]
        if not self._limit_s or not told or any(one.has_left for one in there):
            return [], now, False
        ended = _find_ended(ranks, there)
        least_s = self._limit_s * (1 if self._has_stepped or ended else FIRST_STEP)
        limit_s = max(least_s, _SLOWER * self._slowest_s)
        busy_s = _BUSY * max(least_s, self._longest_s)
        since = max(one.moved for one in told)
        used = max(since, *(one.used for one in told))
        if now - used <= limit_s and now - since <= busy_s:
            return [], now, False
        frozen = [one for one in there if one.is_stopped]
        frozen = frozen or [one for one in told if one.beat.looks and now - one.looked > limit_s / 2]
        late = ended or frozen or _find_unopened(there)
        odd, is_known = (late, True) if late else find_odd(told)
        return odd, since, is_known


def _find_ended(ranks: Iterable[RankReport], there: list[RankReport]) -> list[RankReport]:
    """Those that have ended well and never opened the runtime, while the others that have wait for them there."""
    if any(one.beat.step for one in there) or not any(one.beat.looks for one in there):
        return []
    return [one for one in ranks if one.is_well and not (one.beat.looks or one.beat.step or one.has_touched)]


def _find_unopened(there: list[RankReport]) -> list[RankReport]:
    """Those that have not opened the runtime, while the others that have wait for them: nobody makes a step before."""
    if any(one.beat.step for one in there) or not any(one.beat.looks for one in there):
        return []
    return [one for one in there if not (one.beat.looks or one.has_touched)]


def describe_stand(one: RankReport) -> str:
    """What such a rank does; of one that has ended, what the others do."""
    if one.status is not None:
        return WAITING
    if one.is_stopped:
        return "was stopped by a signal"
    if not (one.beat.looks or one.has_touched):
        return "has not opened hpcddp's runtime, as others have"
    return f"stands at {one.place}" if one.place else NOWHERE
