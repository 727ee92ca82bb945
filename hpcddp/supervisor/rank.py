"""One rank as the supervisor sees it: its state, by one table, and its reports; and which ranks the others wait for."""

from __future__ import annotations

import os

from hpcddp.errors import UNFINISHED
from hpcddp.guard.hpcddp_stand import NO_WAIT
from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.runs.hang import Stand, find_hang, format_stands
from hpcddp.runs.heartbeat import Beat
from hpcddp.supervisor.events import GONE, SILENT

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from hpcddp.supervisor.reports import Caller
    from hpcddp.supervisor.wire import Ended

#: That a rank may take to save and end after a signal, also one that is no wish to end the job.
SAVES_S = 300.0
#: The first step of an attempt takes so many times as long: it compiles.
FIRST_STEP = 10
#: Of a rank that does not report where it stands.
NOWHERE = "is one of them"
_SLOWER = 10  # times the longest time without a move so far
_BUSY = 10  # times as long, for ranks that stand and use the processor
_FRESH_S = 15.0  # a process that holds Python's lock, or is stopped, does not report where it stands
_STOPPED = "a stop by a signal (SIGSTOP)"
_OVER = "its end (status 0)"

# The states, beside SILENT and GONE, which are events as well.
STARTING, STEPPING, STANDING, CLOSED = "starting", "stepping", "standing", "closed"
DISCONNECTED, DEFERRED, ENDED = "lost", "deferred", "ended"
# What happens to a rank.
OPENS, TOUCHES, CLOSES = "opens the runtime", "touches its page", "leaves the runtime"
STANDS, MOVES = "stands", "moves"
BREAKS, STAYS_AWAY, CALLS = "its connection breaks", "stays away", "calls"
FALLS_SILENT, ENDS, DEFERS = "says nothing", "ends", "ends, and its agent waits"
_BACK = ""  # to the state before its connection broke


class RankState(Record):
    """A state. `next`: what may happen in it -> the state after that; anything else changes nothing. `is_event`: coming
    to it is an event. `is_there`: the agent is connected and the program runs."""

    next: Mapping[str, str]
    is_event: bool = False
    is_there: bool = False


_RUNS = {BREAKS: DISCONNECTED, FALLS_SILENT: SILENT, ENDS: ENDED, DEFERS: DEFERRED}
STATES = {
    # its program runs, and has neither opened hpcddp's runtime nor touched its page of memory (`runs/heartbeat.py`)
    STARTING: RankState({OPENS: STEPPING, TOUCHES: STEPPING, **_RUNS}, is_there=True),
    # it has, and its main thread gets on
    STEPPING: RankState({STANDS: STANDING, CLOSES: CLOSED, **_RUNS}, is_there=True),
    # its main thread stands
    STANDING: RankState({MOVES: STEPPING, CLOSES: CLOSED, **_RUNS}, is_there=True),
    # it has left the runtime: what its program does then is not reported
    CLOSED: RankState({OPENS: STEPPING, **_RUNS}, is_there=True),
    # its agent reports nothing, on a connection that is whole
    SILENT: RankState({BREAKS: DISCONNECTED, ENDS: ENDED, DEFERS: DEFERRED}, is_event=True, is_there=True),
    # its agent's connection broke, and may come again
    DISCONNECTED: RankState({CALLS: _BACK, STAYS_AWAY: GONE}),
    # it did not come again in time
    GONE: RankState({CALLS: _BACK}, is_event=True),
    # it has ended by a signal, and its agent stays: the launcher would end others, which still save
    DEFERRED: RankState({BREAKS: ENDED}),
    ENDED: RankState({}),
}


class PlainRank:
    """A rank of a plain script, by what the guard in it reports of its main thread."""

    def __init__(self) -> None:
        self.stand: Stand | None = None  # None: it reports none any more
        self.reported = 0.0  # when
        self.waited: Stand | None = None  # the last one in which it waited for others

    def record(self, stand: Stand, now: float) -> None:
        self.stand, self.reported = stand if stand.line else None, now
        self.waited = stand if stand.waits != NO_WAIT else self.waited


class Rank:
    """A rank of one attempt. Times are of the monotonic clock."""

    def __init__(self, rank: int, host: str, now: float) -> None:
        self.rank, self.host = rank, host
        self.state, self.since = STARTING, now
        self._before = STARTING  # the state before its connection broke
        self.caller: Caller | None = None  # its agent's connection
        self.heard = self.moved = self.used = self.looked = now
        self.beat = Beat()
        self.touched = 0  # the time of its page that its program has set; 0: not known
        self.place = Stand()
        self.plain: dict[int, PlainRank] = {}  # those of a plain script that have a process group; an agent has several
        self.has_opened = False  # the runtime, at some time, or touched its page
        self.status: int | None = None  # its wait status, once it has ended
        self.ended: Ended | None = None  # its agent's last message
        self.signals: dict[int, float] = {}  # that it had before the launcher ended ranks, and when
        self.signal = 0  # of these, the one by which it may have ended
        self.has_event = False

    def change(self, what: str, now: float) -> bool:
        """Change its state. Whether that is an event."""
        after = STATES[self.state].next.get(what, self.state)
        if after == self.state:
            return False
        if after == DISCONNECTED:
            self._before = self.state
        self.state, self.since = after or self._before, now
        self.has_opened |= self.state == STEPPING
        return STATES[self.state].is_event

    def restart_clocks(self, now: float) -> None:
        self.heard = self.moved = self.used = self.looked = self.since = now
        for one in self.plain.values():
            one.reported = now

    @property
    def is_there(self) -> bool:
        return STATES[self.state].is_there

    @property
    def is_over(self) -> bool:
        return self.status is not None or (self.has_event and not self.is_there)

    @property
    def is_well(self) -> bool:
        """Whether it has ended, with 0 or as a run that is to be continued."""
        if self.status is None:
            return False
        return self.status == 0 or (os.WIFEXITED(self.status) and os.WEXITSTATUS(self.status) == UNFINISHED)

    def find_signal(self, status: int, now: float) -> int:
        """The signal by which it may have ended with this wait status: by a status of its own, or killed by that very
        signal. 0: by none."""
        killed_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        return next((one for one, at in self.signals.items() if killed_by in {0, one} and now - at <= SAVES_S), 0)


def _find_blocking(ranks: list[Rank]) -> tuple[list[Rank], bool]:
    """The ranks that the others probably wait for, and whether they are all on one host. They are at the place where
    the fewest stand, among those that do not wait themselves, if there are any. The first rank, and False, where the
    places do not tell one rank from the others."""
    least = min(one.place.waits for one in ranks)  # NO_WAIT, MAY_WAIT or WAITS
    left = [one for one in ranks if one.place.waits == least]
    places = [one.place for one in left]
    fewest = min(map(places.count, places))
    blocking = [one for one in left if places.count(one.place) == fewest]
    if len(blocking) == len(ranks) > 1:
        return ranks[:1], False
    return blocking, len({one.host for one in blocking}) == 1


class StuckDetector:
    """Judges the ranks of one attempt. `limit_s`: how long all may make no step, at least; 0: for ever."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._slowest_s = 0.0  # the longest time in which a rank neither moved nor used the processor
        self._longest_s = 0.0  # in which it did not move
        self._has_stepped = False  # more than once

    def record(self, one: Rank, beat: Beat, now: float) -> None:
        before, one.beat = one.beat, beat
        touches = 0 < one.touched < before.touched <= beat.touched  # else another writer has set it back since
        if touches or not one.touched or beat.looks or before.looks:
            one.touched = beat.touched
        opens = beat.looks > 0 and not before.looks
        if one.state == CLOSED and opens:  # the script opens another runtime, whose first step compiles, too
            self._has_stepped = False
        if beat.looks != before.looks:
            one.looked = now
            one.change(OPENS if beat.looks else CLOSES, now)
        self._has_stepped |= touches and one.has_opened
        if touches:
            one.change(TOUCHES, now)
        moved = (beat.step, beat.moves) != (before.step, before.moves) or touches or opens
        used = beat.uses != before.uses
        if self._has_stepped and (moved or used):
            self._slowest_s = max(self._slowest_s, now - max(one.moved, one.used))
        if self._has_stepped and moved:
            self._longest_s = max(self._longest_s, now - one.moved)
        one.moved = now if moved else one.moved
        one.used = now if used else one.used
        if before.step and beat.step > before.step:
            self._has_stepped = True

    def find_blocking(self, ranks: Collection[Rank], now: float) -> tuple[list[Rank], float, bool]:
        """If no rank has moved for too long: the ranks that the others wait for, since when none has moved, and whether
        these are surely the ones. Else no rank."""
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
        surely = ended or frozen or unopened
        blocking, is_sure = (surely, True) if surely else _find_blocking(opened)
        return blocking, since, is_sure


def _find_unopened(ranks: Iterable[Rank], there: Iterable[Rank]) -> list[Rank]:
    """The ranks that have not opened the runtime, and run or have ended well, while those that have opened it wait for
    them: no rank makes a step before all have opened it."""
    if any(one.beat.step for one in there) or not any(one.beat.looks for one in there):
        return []
    return [one for one in ranks if not one.has_opened and (one.is_there or one.is_well)]


def describe_stand(one: Rank) -> str:
    if one.status is not None:
        return "others wait for it in hpcddp's runtime"
    if one.beat.is_stopped:
        return "was stopped by a signal"
    if not one.has_opened:
        return "has not opened hpcddp's runtime, as others have"
    return f"stands at {one.place}" if one.place.line else NOWHERE


def describe_stall(
    ranks: Collection[Rank], world_size: int, now: float, stall_s: float | None, end_s: float | None
) -> str:
    """Say where ranks stand in the runtime, if some of them have waited for others for `stall_s` (None: for ever); else
    empty. `end_s`: as `PlainHang`."""
    waits = [one for one in ranks if one.state == STANDING and one.place.waits != NO_WAIT]
    if stall_s is None or not any(now - one.since >= stall_s for one in waits):
        return ""
    stood_s = {one.rank: now - one.since if one.state == STANDING else 0.0 for one in ranks}
    places = {one.rank: one.place if one.place.line else Stand("elsewhere") for one in ranks}
    stands = {rank: place._replace(seconds=stood_s[rank]) for rank, place in places.items()}
    return format_stands(stands, world_size, stall_s, end_s)


# ---- plain scripts


def find_stands(ranks: Iterable[Rank], now: float, fresh_s: float = _FRESH_S) -> dict[int, Stand]:
    """Find where each rank of a plain script stands, if it has reported that within `fresh_s`. A rank that has ended
    with 0 stands at its end: it comes to no collective any more."""
    found: dict[int, Stand] = {}
    for one in ranks:
        for rank, plain in one.plain.items():
            if one.status is not None:
                stand = Stand(_OVER, "", now - one.since, NO_WAIT) if one.is_well else None
            elif one.beat.is_stopped:
                stand = Stand(_STOPPED, "", now - plain.reported, NO_WAIT)
            else:
                stand = plain.stand if now - plain.reported < fresh_s else None
            if stand is not None and (one.is_there or one.status is not None):
                found[rank] = stand
    return found


class PlainHang:
    """Judges whether the ranks of a plain script wait for each other, as `training/watchdog.py` does for others.
    `stall_s`, `end_s`: seconds after which that is printed, and after which it ends the attempt; None: never."""

    def __init__(self, stall_s: float | None, end_s: float | None) -> None:
        self._stall_s, self._end_s = stall_s, end_s
        self._is_printed = False

    def check(self, ranks: Collection[Rank], world_size: int, now: float) -> tuple[str, list[int]]:
        """The text to print now, and the ranks that the others have waited for too long."""
        fresh_s = min(_FRESH_S, (self._end_s or _FRESH_S) / 2)  # who leaves a collective has half of the time to say so
        stands = find_stands(ranks, now, fresh_s)
        waited_s = max((stand.seconds for stand in stands.values() if stand.waits != NO_WAIT), default=0.0)
        if self._stall_s is None or waited_s < self._stall_s:
            self._is_printed = False
            return "", []
        hang = find_hang(stands, world_size, self._end_s) if self._end_s is not None else None
        if hang is not None:
            return str(hang.error), hang.ranks
        was_printed, self._is_printed = self._is_printed, True
        return "" if was_printed else format_stands(stands, world_size, self._stall_s, self._end_s), []


def find_late(ranks: Iterable[Rank], now: float) -> list[int]:
    """The ranks of a plain script that wait for no other, while others wait in a collective."""
    return [rank for rank, stand in find_stands(ranks, now).items() if stand.waits == NO_WAIT]


def describe_late(rank: int, ranks: Collection[Rank], now: float) -> str:
    stand = find_stands(ranks, now).get(rank)
    owner = next(one for one in ranks if rank in one.plain)
    others = [(one, plain) for one in ranks for other, plain in one.plain.items() if other != rank and plain.waited]
    waiting = [plain.waited for one, plain in others if plain.stand == plain.waited or (one.status and not one.is_well)]
    is_late = owner.status is not None or stand is None or stand.waits == NO_WAIT
    verb, wait = ("stands", "others wait for it") if is_late else ("waits", "others wait")
    wait += f" at {waiting[0]}" if waiting else ""
    return wait if owner.status is not None else f"{verb} at {stand}; {wait}"
