"""A person asks a job to end through its run's folder (`hpcddp cancel`), where the scheduler's own command would leave
the ranks no time to save. It is then as if a SIGTERM had come."""

from __future__ import annotations

import os
import time
from contextlib import suppress

from hpcddp.record import TYPE_CHECKING
from hpcddp.runs.folder import job_of
from hpcddp.supervisor.asked import ask_beside

if TYPE_CHECKING:
    import signal
    from _queue import SimpleQueue
    from collections.abc import Callable

    from hpcddp.runs.folder import AttemptFolder
else:
    import _signal as signal

#: How often the folder is looked at, in seconds: a shared file system shows a new file a while late anyway.
LOOK_S = 3.0


class StopRequest:
    """The request of one job. `clock`: seconds, from anywhere."""

    def __init__(self, attempt: AttemptFolder, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = attempt.run.stop_request(job_of(attempt.name))
        self._clock = clock
        self._next = 0.0
        self._taken: SimpleQueue[None] | None = None  # of the last look, once it is over

    def look(self) -> None:
        """Send this process a SIGTERM if somebody has asked; each request counts once. The folder is looked at beside
        this process: where its file system hangs, the ranks would not be heard, and end themselves."""
        if self._clock() < self._next or (self._taken is not None and self._taken.empty()):
            return
        self._next = self._clock() + LOOK_S
        self._taken = ask_beside(self._take)

    def _take(self) -> None:
        if os.path.exists(self._path):
            with suppress(OSError):
                os.unlink(self._path)
            os.kill(os.getpid(), signal.SIGTERM)
