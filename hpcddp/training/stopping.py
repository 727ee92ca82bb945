"""Stopping in time: signals that only set a flag, and a deadline that needs no signal (PBS sends none).

Nothing here stops anything. The flags travel to all ranks in the step's reduction, so that all stop at the same step.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from hpcddp.errors import LaunchError
from hpcddp.training.pace import STEPS_UNTIL_AGREED, Pace

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
DEADLINE = "deadline"
STOP_FLAGS = (
    DEADLINE,
    *(number.name for number in STOP_SIGNALS),
)  # reasons, in the order in which ranks exchange them

_LOOKS_EVERY = 32  # steps: Python makes an enum of each handler that it is asked for

STOP, FINISH, SAVE = "asks to stop", "asks to finish", "asks to save"
REQUESTS = (STOP, FINISH, SAVE)  # what one rank may ask of all


class StopTraining(BaseException):
    """Takes a run that has to stop before its end out of the body of `hpcddp.runtime()`, after its checkpoint.

    What follows the loop there (an evaluation, a model's file) would be that of a finished training.
    """


class SignalFlag:
    """Which stop signal came, if any."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._is_obeyed = False
        self.are_caught = False

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received = signal.Signals(number)  # no output, no file, no collective: the main thread may hold any lock

    def describe_taken(self) -> str | None:
        """Once: a warning that the script has put a handler of its own in the place of this one, or None."""
        mine = [number.name for number in STOP_SIGNALS if signal.getsignal(number) == self._note]
        taken = [number.name for number in STOP_SIGNALS if number.name not in mine]
        if not self.are_caught or not taken:
            return None
        self.are_caught = False
        return (
            f"the script has set a handler of its own for {' and '.join(taken)} in the runtime's body, and what stops"
            " the run in time does not hear it\nhint: call signal.signal before hpcddp.runtime(…), or rt.stop(reason)"
            " in the loop after that signal"
        )

    def obey(self) -> None:
        """The run stops in time: until this process ends, signals that come again are ignored.

        The signal of another rank may reach this one later. Python ends without its handlers, and the default action
        would kill a process that has saved; what is ignored stays so to the last.
        """
        self._is_obeyed = True

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Catch the stop signals inside the body. Outside the main thread Python cannot, and nothing is caught."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        self.are_caught = True
        try:
            yield
        finally:
            for number, previous in before.items():
                if self._is_obeyed:
                    previous = signal.SIG_IGN
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
    """Whether this rank has a reason to stop: a signal, or no time for more steps and a save, by its `pace`."""

    def __init__(
        self,
        signals: SignalFlag,
        deadline: float | None,
        pace: Pace | None = None,
        now: Callable[[], float] = time.time,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        """`warn`: who says it where the script takes the signals away; None where another rank does."""
        self._warn = warn
        self._asked = 0
        self.deadline = deadline  # seconds since 1970, as `now`
        self.pace = pace or Pace()
        self._signals = signals
        self._now = now

    def move_deadline(self, at: float) -> None:
        """The job was given more time, or less."""
        if self.deadline is not None:
            self.deadline = at

    def flags(self, steps: int = STEPS_UNTIL_AGREED, *, tail: bool = False) -> tuple[str, ...]:
        """This rank's reasons, of STOP_FLAGS. `steps` and `tail`: what is to fit before the deadline."""
        self._asked += 1
        if self._warn is not None and self._asked % _LOOKS_EVERY == 1:
            taken = self._signals.describe_taken()
            if taken is not None:
                self._warn(taken)
        came = (self._signals.received.name,) if self._signals.received is not None else ()
        ends = self.deadline
        is_late = ends is not None and self._now() + self.pace.needed_s(steps, tail=tail) > ends
        return ((DEADLINE,) if is_late else ()) + came
