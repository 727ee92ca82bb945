"""What the job prints and logs is written beside the supervisor: a reader that pauses, or a file system that hangs,
does not keep it from hearing the ranks, which would end themselves."""

from __future__ import annotations

import _thread
import os
import select
import time
from _queue import SimpleQueue  # queue would import threading, which costs a tenth of the start
from contextlib import suppress

from hpcddp.record import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcddp.supervisor.program import Signals

#: What is kept in memory for a slow reader. Above it nothing more is read of the launcher, whose ranks then wait.
MOST_BYTES = 64 * 1024 * 1024
_STEP_S = 0.02
_REST_S = 5.0  # for what is left, once somebody wants the job to end


class Writer:
    """Writes to some descriptors, in the order in which it was asked."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[int, bytes]] = SimpleQueue()
        self._lock = _thread.allocate_lock()
        self._left = 0  # bytes
        _thread.start_new_thread(self._write_on, ())

    def write(self, descriptor: int, data: bytes) -> None:
        """Now or later; it does not wait."""
        with self._lock:
            self._left += len(data)
        self._queue.put((descriptor, data))

    @property
    def left(self) -> int:
        """How many bytes are still to be written."""
        return self._left

    def _write_on(self) -> None:
        while True:
            descriptor, data = self._queue.get()
            _write_all(descriptor, data)
            with self._lock:
                self._left -= len(data)


class Output:
    """Of one job: what it prints, and the launcher's log beside it, which does not wait for who reads the other."""

    def __init__(self) -> None:
        self._printed, self._logged = Writer(), Writer()

    def tell(self, data: bytes) -> None:
        """Something of the supervisor's own, on stderr."""
        self._printed.write(2, data)

    def pass_on(self, data: bytes, log: int | None) -> None:
        """Something of the launcher's."""
        self._printed.write(1, data)
        if log is not None:
            self._logged.write(log, data)

    @property
    def is_full(self) -> bool:
        """Whether so much waits to be written that no more should come."""
        return max(self._printed.left, self._logged.left) > MOST_BYTES

    def finish(self, signals: Signals) -> None:
        """Wait until all is written; not for long once a signal comes."""
        until = None
        while (self._printed.left or self._logged.left) and (until is None or time.monotonic() < until):
            time.sleep(_STEP_S)
            if signals.read() and until is None:
                until = time.monotonic() + _REST_S


def _write_all(descriptor: int, data: bytes) -> None:
    """A full disk or a terminal that is gone does not end the job."""
    with suppress(OSError):
        while data:
            try:
                data = data[os.write(descriptor, data) :]
            except BlockingIOError:  # another program has set its end of this terminal or pipe so
                poll = select.poll()
                poll.register(descriptor, select.POLLOUT)
                poll.poll()
