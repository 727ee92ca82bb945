"""Whether the ranks of an attempt get on, by what they have shown so far of how long they may stand."""

from __future__ import annotations

from hpcddp.record import TYPE_CHECKING
from hpcddp.runs.heartbeat import MAY_WAIT, WAITS
from hpcddp.supervisor.rank import CLOSED, CLOSES, OPENS, TOUCHES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from hpcddp.runs.heartbeat import Beat
    from hpcddp.supervisor.rank import Rank


def find_odd(ranks: list[Rank]) -> tuple[list[Rank], bool]:
    """Find those that stand where few others do, and do not wait for others if some do not: those wait for them; and
    whether that names one host. Where it tells none from the others: the first one."""
    left = ranks
    for waits in (WAITS, MAY_WAIT):
        left = [one for one in left if one.place.waits < waits] or left
    places = [one.place for one in left]
    fewest = min(map(places.count, places))
    odd = [one for one in left if places.count(one.place) == fewest]
    if len(odd) == len(ranks) > 1:
        return ranks[:1], False
    return odd, len({one.host for one in odd}) == 1


#: Times as long as a step: the first one of an attempt compiles.
FIRST_STEP = 10
#: Of a rank that does not say where it stands.
NOWHERE = "is one of them"
_SLOWER = 10  # times the longest time without a move so far
_BUSY = 10  # times as long, for ranks that stand and use the processor


class StuckDetector:
    """Judges the ranks of one attempt. `limit_s`: how long all ranks may make no step at least; 0: for ever."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._slowest_s = 0.0  # the longest time in which a rank neither moved nor used the processor
        self._longest_s = 0.0  # in which it did not move
        self._has_stepped = False  # more than once: the first step of an attempt compiles

    def note(self, one: Rank, beat: Beat, now: float) -> None:
        """Note what this rank says of itself."""
        before, one.beat = one.beat, beat
        # a page is made at some time, too; and the runtime writes to it when it is left
        touches = one.state != CLOSED and not (beat.looks or before.looks) and before.touched not in {0, beat.touched}
        opens = beat.looks > 0 and not before.looks
        if one.state == CLOSED and opens:  # the script opens another runtime, whose first step compiles, too
            self._has_stepped = False
        if beat.looks != before.looks:
            one.looked = now
            one.change(OPENS if beat.looks else CLOSES, now)
        self._has_stepped |= touches and one.has_opened
        if touches:
            one.change(TOUCHES, now)
        moved = beat.step != before.step or beat.moves != before.moves or touches or opens
        used = beat.uses != before.uses
        if self._has_stepped and (moved or used):
            self._slowest_s = max(self._slowest_s, now - max(one.moved, one.used))
        if self._has_stepped and moved:
            self._longest_s = max(self._longest_s, now - one.moved)
        one.moved = now if moved else one.moved
        one.used = now if used else one.used
        if before.step and beat.step > before.step:
            self._has_stepped = True

    def find_stuck(self, ranks: Collection[Rank], now: float) -> tuple[list[Rank], float, bool]:
        """Find those that the others wait for, if no rank gets on, since when, and whether it is known that these are
        the ones; empty: some rank does."""
        there = [one for one in ranks if one.is_there]
        opened = [one for one in there if one.has_opened]
        if not self._limit_s or not opened or any(one.state == CLOSED for one in there):
            return [], now, False
        unopened = _find_unopened(ranks, there)
        ended = [one for one in unopened if one.is_well]
        least_s = self._limit_s * (1 if self._has_stepped or ended else FIRST_STEP)
        limit_s = max(least_s, _SLOWER * self._slowest_s)
        busy_s = _BUSY * max(least_s, self._longest_s)
        since = max(one.moved for one in opened)
        used = max(since, *(one.used for one in opened))
        if now - used <= limit_s and now - since <= busy_s:
            return [], now, False
        frozen = [one for one in there if one.beat.is_stopped]
        frozen = frozen or [one for one in opened if one.beat.looks and now - one.looked > limit_s / 2]
        late = ended or frozen or unopened
        odd, is_known = (late, True) if late else find_odd(opened)
        return odd, since, is_known


def _find_unopened(ranks: Iterable[Rank], there: list[Rank]) -> list[Rank]:
    """Find those that have not opened the runtime and run or have ended well, while the others that have wait for them:
    nobody makes a step before."""
    if any(one.beat.step for one in there) or not any(one.beat.looks for one in there):
        return []
    return [one for one in ranks if not one.has_opened and (one.is_there or one.is_well)]


def describe_stand(one: Rank) -> str:
    """What such a rank does; of one that has ended, what the others do."""
    if one.status is not None:
        return "others wait for it in hpcddp's runtime"
    if one.beat.is_stopped:
        return "was stopped by a signal"
    if not one.has_opened:
        return "has not opened hpcddp's runtime, as others have"
    return f"stands at {one.place.text}" if one.place.text else NOWHERE
