"""The end of an attempt of which ranks are lost or have failed: no launcher can be trusted to see it, or to end then.

What is known of it: Intel MPI and MPICH wait for ever for the others of a rank that ended with status 1; every launcher
does where a host falls silent; Open MPI leaves ranks behind.
"""

from __future__ import annotations

import time

from hpcddp.record import TYPE_CHECKING
from hpcddp.supervisor.events import SILENT, STUCK, UNKNOWN, Event, find_first_cause

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable

    from hpcddp.supervisor.program import LauncherProcess
    from hpcddp.supervisor.reports import Reports
else:
    import _signal as signal

_LOOK_S = 1.0
#: For what other ranks say: the first one to end need not be the cause. And for a rank that failed to report it on the
#: job's output (`runs/failure.py`): a launcher kills it as soon as another one has ended.
_COLLECT_S = 5.0
_LAUNCHER_S = 30.0  # that it gets to end by itself, where nothing is started again
_TERM_S = 1.0  # from the end of the ranks
_KILL_S = 5.0  # from SIGTERM, which Open MPI 5 and Intel MPI ignore while a host is silent
_LAST_WORDS_S = 1.0
_DEAF = """\
warning: the ranks were started, and none can call this host: one that hangs, or whose host falls silent, is not seen
hint: let the nodes of a job reach each other on every port, as their training needs it, too"""


class Teardown:
    """The end of one attempt. `acts`: whether the ranks may be started again, so that a silent one is an end as well.
    `judges`: whether the end of one rank is that of all; False where they are independent."""

    def __init__(self, reports: Reports, tell: Callable[[str], None], *, acts: bool, judges: bool = True) -> None:
        self._reports, self._tell, self._acts, self._judges = reports, tell, acts, judges
        self._began: float | None = None  # the first event
        self._ended_at: float | None = None  # the ranks were told to end
        self._sent = 0
        self._is_deafness_printed = False
        self.is_wish = False  # a signal came: the ranks may end as they like

    @property
    def entry(self) -> int:
        """What is readable when a rank has said something."""
        return self._reports.entry

    def look(self, launcher: LauncherProcess) -> float:
        """Hear the ranks, and do what is due; how long to wait at most until the next look, in seconds."""
        self._reports.read()
        self._reports.look()
        while self._reports.remarks:
            self._tell(self._reports.remarks.pop(0))
        now = time.monotonic()
        if self._reports.is_deaf and not self._is_deafness_printed:
            self._is_deafness_printed = True
            self._tell(_DEAF)
        is_due = self._reports.events and self._judges and not self._reports.is_holding  # some save
        if not is_due and self._ended_at is None:
            return _LOOK_S
        self._began = self._began or now
        if self._ended_at is None:
            waits_s = _COLLECT_S if self._acts and not self.is_wish else _COLLECT_S + _LAUNCHER_S
            if any(event.kind in {SILENT, STUCK} for event in self._reports.events):
                waits_s = 0.0  # the limit was long enough for everybody
            if now - self._began > waits_s:
                self._reports.settle()
                self._ended_at = now
                if not self._reports.all_over:
                    cause = find_first_cause(self._reports.events)
                    self._tell(f"{cause}: the other ranks are ended")
                self._reports.end_all()
        elif self._sent == 0 and now - self._ended_at > _TERM_S:
            self._sent = signal.SIGTERM
            launcher.send(signal.SIGTERM)
        elif self._sent == signal.SIGTERM and now - self._ended_at > _TERM_S + _KILL_S:
            self._sent = signal.SIGKILL
            launcher.send(signal.SIGKILL)
        return _LOOK_S / 4

    def kill(self) -> None:
        """End the ranks now, whatever they do."""
        self._ended_at = self._ended_at or time.monotonic()
        self._reports.end_all()

    def find_signal(self, cause: Event | None) -> int:
        """The signal that came to the ranks and by which they may have ended; 0: by none. `cause`: as concluded, of
        ranks that did not end well."""
        if cause is not None and cause.kind != UNKNOWN:
            return cause.signal
        signals = [one.signal for one in self._reports.ranks.values()]
        if cause is not None and not all(signals):
            return 0  # the launcher has ended them for a reason of its own
        return next(filter(None, signals), 0)

    def conclude(self, status: int) -> Event | None:
        """The launcher has ended, with this status: what the first cause was; None if all went well."""
        until = time.monotonic() + _LAST_WORDS_S
        self._reports.read()
        while not self._reports.all_over and time.monotonic() < until:
            time.sleep(0.02)
            self._reports.read()
        if status or self._reports.events or not self._reports.all_over:
            self._reports.settle()
        cause = find_first_cause(self._reports.events)
        self._reports.end_all()
        if cause is not None and cause.kind == STUCK and self._ended_at is None and self._judges:
            self._tell(str(cause))  # the launcher was faster
        if not self._judges:
            return None
        if cause is None and self._reports.all_well:
            return None  # only the launcher itself did not end well: nothing is to be made again
        if status and (cause is None or cause.is_clean_up):
            return Event(UNKNOWN, -1, "", status=status, text=f"the launcher ended with status {status}")
        return cause
