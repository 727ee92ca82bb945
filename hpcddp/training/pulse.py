"""A rank's sign of life, for its agent: how far it is, and whether its main thread gets on.

The main thread gets on if it makes a step or stands elsewhere than before. One that stands and uses the processor may
work or wait: a loop without end does, and a thread that waits for a GPU. That is told, too, and that the process is
at a checkpoint's files, where one call may wait for the disk for minutes. One that waits in a collective does none of
these; one whose GPU works may do none either, so that the limit has to be long.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType

from hpcddp.guard.hpcddp_stand import list_places
from hpcddp.runs.heartbeat import VARIABLE, WAITS, Page, Place, open_page
from hpcddp.training.activity import is_at_files, is_waiting
from hpcddp.training.watchdog import find_stand

_EVERY_S = 0.25
_STANDS = 8  # looks without a move, before it is told where the thread stands
_LEAST_CPU = 0.02  # of the time
_PAST = 8  # looks after the lease's end: a process that was suspended lets its agent be first


class Pulse:
    """Of the thread that makes it, from then on. Without a page nobody listens, and nothing is done."""

    def __init__(self, page: Page | None) -> None:
        self._page = page
        self._step: Callable[[], int] = int  # 0
        self._tell_end: Callable[[float], None] | None = None
        self._thread = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._thread)
        self._over = threading.Event()
        self._moves = self._looks = self._uses = self._past = 0
        self._is_told = False  # where the thread stands
        self._beats = threading.Thread(target=self._beat, name="hpcddp-pulse", daemon=True)
        if page is not None:
            self._beats.start()

    @contextmanager
    def following(self, step: Callable[[], int], tell_end: Callable[[float], None]) -> Iterator[None]:
        """`step()`: the optimizer steps so far, in the body, whose step is the last that is told. `tell_end`: the job
        ends at another time."""
        self._step, self._tell_end = step, tell_end
        try:
            yield
        finally:
            self.stop()

    def stop(self) -> None:
        """The rank is leaving, and says no more."""
        self._over.set()
        if self._beats.is_alive():
            self._beats.join()
            self._looks = 0
            self._tell()

    def _beat(self) -> None:
        before, used_s = list_places(self._thread), time.clock_gettime(self._clock)
        stood = 0
        while not self._over.wait(_EVERY_S):
            place, now_s = list_places(self._thread), time.clock_gettime(self._clock)
            self._looks += 1
            moved = place != before
            self._moves += moved
            self._uses += not moved and (now_s - used_s > _EVERY_S * _LEAST_CPU or is_at_files())
            before, used_s = place, now_s
            stood = 0 if moved else stood + 1
            self._tell()
            if stood == _STANDS or (moved and self._is_told):
                self._tell_place(stands=stood == _STANDS)
            self._listen()

    def _listen(self) -> None:
        assert self._page is not None
        with suppress(OSError, ValueError):
            if self._tell_end is not None and (end := self._page.read_end()) is not None:
                self._tell_end(end)
            until = self._page.read_lease()
            self._past = self._past + 1 if until is not None and time.monotonic() > until else 0
            if self._past > _PAST:
                os.kill(os.getpid(), signal.SIGKILL)  # another attempt may have begun: this one writes no more

    def _tell(self) -> None:
        assert self._page is not None
        with suppress(OSError):
            self._page.write(self._step(), self._moves, self._looks, self._uses)

    def _tell_place(self, *, stands: bool) -> None:
        assert self._page is not None
        frame, self._is_told = self._frame() if stands else None, stands
        place = Place()
        if frame is not None:
            stand = find_stand(frame, 0)
            place = Place(str(stand), WAITS if is_waiting(self._thread) else stand.waits)
        with suppress(OSError, ValueError):
            self._page.write_place(place)

    def _frame(self) -> FrameType | None:
        return sys._current_frames().get(self._thread)


@contextmanager
def beating(env: Mapping[str, str]) -> Iterator[Pulse]:
    """Beat in the body, if anybody listens."""
    pulse = Pulse(open_page(env.get(VARIABLE)))
    try:
        yield pulse
    finally:
        pulse.stop()
