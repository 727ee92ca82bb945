"""One rank as the supervisor sees it: its state, by one table, and what it has said."""

from __future__ import annotations

import os

from hpcddp.errors import UNFINISHED
from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.runs.heartbeat import Beat, Place
from hpcddp.supervisor.events import GONE, SILENT
from hpcddp.supervisor.wire import Incoming

if TYPE_CHECKING:
    import signal
    import socket
    from collections.abc import Mapping
else:
    import _signal as signal

#: That a rank may take to save and end after a signal, also one that is no wish to end the job.
SAVES_S = 300.0
_LEAST_SAVES_S = 30.0  # that ranks get to save after one has failed behind a signal that is no such wish
_WISHES = (signal.SIGTERM, signal.SIGINT)  # to end the job

# The states.
STARTING = "starting"  # its program has not opened hpcddp's runtime, nor touched its page
STEPPING = "stepping"  # it has, and gets on
STANDING = "standing"  # its main thread stands
CLOSED = "closed"  # it has left the runtime: what its program does then, it does not say
LOST = "lost"  # its connection broke, and may come again
HELD = "held"  # it has ended by a signal, and its agent waits for ranks that still save
ENDED = "ended"
# What may happen in them.
OPENS, TOUCHES, CLOSES = "opens the runtime", "touches its page", "leaves the runtime"
STANDS, MOVES = "stands", "moves"
BREAKS, STAYS_AWAY, CALLS = "its connection breaks", "stays away", "calls"
FALLS_SILENT, ENDS, WAITS_FOR_OTHERS = "says nothing", "ends", "ends, and its agent waits"
_BACK = ""  # to the state before it was lost


class State(Record):
    """`next`: what may happen in it -> the state after that. What is not here changes nothing. `is_event`: whether a
    rank that comes to this state is an event. `is_there`: whether its agent is connected and its program runs."""

    next: Mapping[str, str]
    is_event: bool = False
    is_there: bool = False


_LIVES = {BREAKS: LOST, FALLS_SILENT: SILENT, ENDS: ENDED, WAITS_FOR_OTHERS: HELD}
STATES = {
    STARTING: State({OPENS: STEPPING, TOUCHES: STEPPING, **_LIVES}, is_there=True),
    STEPPING: State({STANDS: STANDING, CLOSES: CLOSED, **_LIVES}, is_there=True),
    STANDING: State({MOVES: STEPPING, CLOSES: CLOSED, **_LIVES}, is_there=True),
    CLOSED: State({OPENS: STEPPING, **_LIVES}, is_there=True),
    SILENT: State({BREAKS: LOST, ENDS: ENDED, WAITS_FOR_OTHERS: HELD}, is_event=True, is_there=True),
    LOST: State({CALLS: _BACK, STAYS_AWAY: GONE}),
    GONE: State({CALLS: _BACK}, is_event=True),
    HELD: State({BREAKS: ENDED}),
    ENDED: State({}),
}


class Rank:
    """A rank of one attempt. Times are of the monotonic clock."""

    def __init__(self, rank: int, host: str, now: float) -> None:
        self.rank, self.host = rank, host
        self.state, self.since = STARTING, now
        self._before = STARTING  # it was lost
        self.connection: socket.socket | None = None
        self.incoming = Incoming()
        self.heard = self.moved = self.used = self.looked = now
        self.beat = Beat()
        self.place = Place()
        self.has_opened = False  # the runtime, at some time, or touched its page
        self.status: int | None = None  # its wait status, once it has ended
        self.signals: dict[int, float] = {}  # that it had before the launcher ended ranks, and when
        self.signal = 0  # of these, the one by which it may have ended
        self.unheard_s = 0  # for how long it had not heard this process when it was ended for that
        self.is_noted = False  # whether there is an event about it

    def change(self, what: str, now: float) -> bool:
        """Note what happens to it. Whether that is an event."""
        after = STATES[self.state].next.get(what, self.state)
        if after == self.state:
            return False
        if after == LOST:
            self._before = self.state
        self.state, self.since = after or self._before, now
        self.has_opened |= self.state == STEPPING
        return STATES[self.state].is_event

    def forgive(self, now: float) -> None:
        """Count its times from now: nobody could be heard until now."""
        self.heard = self.moved = self.used = self.looked = self.since = now

    @property
    def is_there(self) -> bool:
        """Whether its agent is connected and its program runs."""
        return STATES[self.state].is_there

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be expected of it."""
        return self.status is not None or (self.is_noted and not self.is_there)

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

    @property
    def others_save_until(self) -> float:
        """Until when others may save, of a rank that is held. One that failed behind a signal that is no wish to end
        the job may have saved, trained on and failed: the others would wait for it, and get as long again as it
        took."""
        if self.status is None or self.is_well or self.signal in _WISHES or os.WIFSIGNALED(self.status):
            return float("inf")
        return self.heard + max(self.heard - self.signals[self.signal], _LEAST_SAVES_S)
