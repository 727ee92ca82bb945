"""A rank's sign of life, for the process beside it: how far it is, and whether its main thread gets on.

The main thread gets on if it makes a step, stands elsewhere than before, or uses the processor. One that waits in
a collective does none of these; one whose GPU works may do none either, so that the limit has to be long.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType

from hpcddp.runs.heartbeat import VARIABLE, Page, open_page
from hpcddp.training.watchdog import find_stand, list_places

_EVERY_S = 0.25
_STANDS = 8  # looks without a move, before it is told where the thread stands
_LEAST_CPU = 0.02  # of the time


class Pulse:
    """Of the thread that makes it. `step()`: the optimizer steps so far; `tell_end`: the job ends at another time."""

    def __init__(self, page: Page, step: Callable[[], int], tell_end: Callable[[float], None]) -> None:
        self._page, self._step, self._tell_end = page, step, tell_end
        self._thread = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._thread)
        self._over = threading.Event()
        self._moves = self._looks = 0
        self._is_told = False  # where the thread stands

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Until the body's end, whose step is the last that is told."""
        beats = threading.Thread(target=self._beat, name="hpcddp-pulse", daemon=True)
        beats.start()
        try:
            yield
        finally:
            self._over.set()
            beats.join()
            self._looks = 0  # the rank is leaving, and says no more
            self._tell()

    def _beat(self) -> None:
        before, used_s = list_places(self._frame()), time.clock_gettime(self._clock)
        stood = 0
        while not self._over.wait(_EVERY_S):
            place, now_s = list_places(self._frame()), time.clock_gettime(self._clock)
            self._looks += 1
            moved = place != before or now_s - used_s > _EVERY_S * _LEAST_CPU
            self._moves += moved
            before, used_s = place, now_s
            stood = 0 if moved else stood + 1
            self._tell()
            with suppress(OSError, ValueError):
                if stood == _STANDS or (moved and self._is_told):
                    self._tell_place(stands=stood == _STANDS)
                if (end := self._page.read_end()) is not None:
                    self._tell_end(end)

    def _tell(self) -> None:
        with suppress(OSError):
            self._page.write(self._step(), self._moves, self._looks)

    def _tell_place(self, *, stands: bool) -> None:
        frame, self._is_told = self._frame(), stands
        self._page.write_place(str(find_stand(frame, 0)) if stands and frame is not None else "")

    def _frame(self) -> FrameType | None:
        return sys._current_frames().get(self._thread)


@contextmanager
def beating(env: Mapping[str, str], step: Callable[[], int], tell_end: Callable[[float], None]) -> Iterator[None]:
    """Beat in the body, if anybody listens."""
    page = open_page(env.get(VARIABLE))
    if page is None:
        yield
        return
    with Pulse(page, step, tell_end).beating():
        yield
