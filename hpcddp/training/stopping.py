"""Stopping in time: signals that only set a flag, and a deadline that needs no signal (PBS sends none).

Nothing here stops anything. The flags travel to all ranks in the step's reduction, so that all stop at the same step.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from hpcddp.errors import LaunchError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
STOP_FLAGS = (
    "deadline",
    *(number.name for number in STOP_SIGNALS),
)  # reasons, in the order in which ranks exchange them
_REMEMBERED_STEPS = 100
_SAVE_ALLOWANCE = 1.5
_MARGIN_S = 5.0


class SignalFlag:
    """Which stop signal came, if any."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received = signal.Signals(number)  # no output, no file, no collective: the main thread may hold any lock

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Catch the stop signals inside the body. Outside the main thread Python cannot, and nothing is caught."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, previous in before.items():
                signal.signal(number, previous if previous is not None else signal.SIG_DFL)


def read_deadline(env: Mapping[str, str]) -> float | None:
    """HPCDDP_DEADLINE in seconds since 1970, which the job script exports; None without one."""
    text = env.get("HPCDDP_DEADLINE")
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        raise LaunchError(
            f"HPCDDP_DEADLINE is {text!r}, which is no number of seconds since 1970",
            "export HPCDDP_DEADLINE=$(($(date +%s) + SECONDS_LEFT))",
        ) from None


class StopWatch:
    """Whether this rank has a reason to stop: a signal, or no time for more steps and a save.

    Time is judged by the slowest of the last steps and of the saves so far.
    """

    def __init__(self, signals: SignalFlag, deadline: float | None) -> None:
        self.deadline = deadline
        self._signals = signals
        self._step_s: deque[float] = deque(maxlen=_REMEMBERED_STEPS)
        self._save_s = 0.0
        self._last: float | None = None

    def step_ended(self) -> None:
        now = time.monotonic()
        if self._last is not None:
            self._step_s.append(now - self._last)
        self._last = now

    def save_ended(self, seconds: float) -> None:
        self._save_s = max(self._save_s, seconds)
        self._last = time.monotonic()  # a save is not part of a step's time

    def flags(self) -> tuple[str, ...]:
        """This rank's reasons, of STOP_FLAGS."""
        came = (self._signals.received.name,) if self._signals.received is not None else ()
        return (("deadline",) if self._is_late() else ()) + came

    def _is_late(self) -> bool:
        if self.deadline is None:
            return False
        # ranks agree one step late, so two more steps have to fit
        needed_s = 2 * max(self._step_s, default=0.0) + _SAVE_ALLOWANCE * self._save_s + _MARGIN_S
        return time.time() + needed_s > self.deadline
