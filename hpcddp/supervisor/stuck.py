"""Whether the ranks of an attempt get on, by what they have shown so far of how long they may stand."""

from __future__ import annotations

import os
import re

from hpcddp.record import TYPE_CHECKING
from hpcddp.runs.heartbeat import Beat
from hpcddp.supervisor.end import UNFINISHED

if TYPE_CHECKING:
    import _socket
    from collections.abc import Collection, Iterable


# What is known of one rank while its attempt runs.


#: That a rank may take to save and end after a signal, also one that is no wish to end the job.
SAVES_S = 300.0
# Where ranks wait for each other, by the innermost function that the program's line is in: collectives of torch and of
# FSDP, and hpcddp's own exchanges.
_IN_COLLECTIVE = re.compile(
    r"\(in ((\w*_)?(all_\w+|barrier|broadcast\w*|gather\w*|reduce\w*|scatter\w*|send|recv|wait_tensor)"
    r"|pull|last_vote|_end_oldest|wait_until)\)$"
)
# Where they may wait, or compute: the backward pass, in which DDP's buckets are reduced; operators of a DTensor; and
# for a GPU whose collective does not end, or a work handle, by the call in the line itself (no Python function).
_MAY_WAIT = re.compile(
    r"\(in (_engine_run_backward|__call__|synchronize)\)$|\.(wait|item|cpu|tolist|synchronize)\(\)(?!.*\(in \w+\)$)"
)


class RankReport:
    """Times are of the monotonic clock; 0: not yet."""

    def __init__(self, rank: int, host: str, now: float) -> None:
        self.rank, self.host = rank, host
        self.connection: _socket.socket | None = None
        self.begun = b""  # of a message
        self.heard = self.moved = self.used = self.looked = now
        self.beat = Beat()
        self.is_stopped = False
        self.place = ""  # where its program stands, if it does
        self.has_touched = False  # its page, of a program that says nothing else
        self.has_left = False  # the runtime: what its program does then, it does not say
        self.left = 0.0  # when its connection broke
        self.status: int | None = None  # its wait status, once it has ended
        self.signals: dict[int, float] = {}  # that it had before the launcher ended ranks, and when
        self.signal = 0  # of these, the one by which it may have ended
        self.unheard_s = 0  # for how long it had not heard this process when it was ended for that
        self.is_told = False  # whether there is an event about it

    def forgive(self, now: float) -> None:
        """Nobody could be heard until now."""
        self.heard = self.moved = self.used = self.looked = now
        self.left = now if self.left else 0.0

    @property
    def is_held(self) -> bool:
        """Whether it has ended, and its agent waits for ranks that still save."""
        return self.status is not None and self.connection is not None

    def find_signal(self, status: int, now: float) -> int:
        """The signal by which it may have ended with this wait status: by a status of its own, or killed by that very
        signal. 0: by none."""
        killed_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        return next((one for one, at in self.signals.items() if killed_by in {0, one} and now - at <= SAVES_S), 0)

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be expected of it."""
        return self.status is not None or (self.is_told and self.connection is None)

    @property
    def is_well(self) -> bool:
        """Whether it has ended, with 0 or as a run that is to be continued."""
        if self.status is None:
            return False
        return self.status == 0 or (os.WIFEXITED(self.status) and os.WEXITSTATUS(self.status) == UNFINISHED)


def find_odd(ranks: list[RankReport]) -> tuple[list[RankReport], bool]:
    """Those that stand where few others do, and do not wait for others if some do not: those wait for them; and whether
    that names one host. Where it tells none from the others: the first one."""
    left = ranks
    for waits in (_IN_COLLECTIVE, _MAY_WAIT):
        left = [one for one in left if not waits.search(one.place)] or left
    places = [one.place for one in left]
    fewest = min(map(places.count, places))
    odd = [one for one in left if places.count(one.place) == fewest]
    if len(odd) == len(ranks) > 1:
        return ranks[:1], False
    return odd, len({one.host for one in odd}) == 1


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
