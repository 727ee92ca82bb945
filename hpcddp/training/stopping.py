"""Reasons to stop in time: signals, which only set a flag, and the job's deadline, which needs no signal (PBS sends
none), by how long steps, saves and evaluations take.

Nothing here stops anything. The flags travel to all ranks in the step's reduction, so that all stop at the same step.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from hpcddp.errors import LaunchError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
DEADLINE = "deadline"
STOP_FLAGS = (DEADLINE, *(number.name for number in STOP_SIGNALS))  # in the order in which ranks exchange them

STOP, FINISH, SAVE = "asks to stop", "asks to finish", "asks to save"
REQUESTS = (STOP, FINISH, SAVE)  # what one rank may ask of all

STEPS_UNTIL_AGREED = 2  # until all ranks know of a flag that one of them has raised
_REMEMBERED_STEPS = 100
_SAVE_ALLOWANCE = 1.5  # of the slowest save: file systems have worse days
_MARGIN_S = 5.0
_LONG_TAIL_S = 5.0


class StopTraining(BaseException):
    """Takes a run that has to stop before its end out of the body of `hpcddp.runtime()`, after its checkpoint.

    What follows the loop there (an evaluation, a model's file) would be that of a finished training.
    """


class SignalFlag:
    """Which stop signal came, if any."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._is_obeyed = False

    def _record(self, number: int, _frame: FrameType | None) -> None:
        self.received = signal.Signals(number)  # no output, no file, no collective: the main thread may hold any lock

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
        before = {number: signal.signal(number, self._record) for number in STOP_SIGNALS}
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


class SaveTimer:
    """When rank 0 asks for a save: `interval_s` of training after the last one. `clock` is in seconds."""

    def __init__(self, interval_s: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s, self._clock = interval_s, clock
        self.restart()

    def restart(self) -> None:
        """The training begins, or a save has ended."""
        self._since = self._clock()

    @property
    def is_due(self) -> bool:
        return self._clock() - self._since >= self._interval_s


class Pace:
    """Measured times of this attempt. `clock` is in seconds, from anywhere.

    A step's time runs from the end of the step before, or from the start of the loader's loop if that came later: a
    save, an evaluation or anything else between two epochs is no part of it. The tail of an epoch is what the loop's
    body does after its last step: usually an evaluation.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.batches = 0  # that the loops over all loaders were given
        self._clock = clock
        self._step_s: deque[float] = deque(maxlen=_REMEMBERED_STEPS)
        self.training_s = 0.0  # of all steps but the first
        self.steps = 0
        self._save_s = 0.0
        self._measured_save = False
        self.tail_s: float | None = None  # the longest tail so far, or that of the attempt before
        self._measured_tail = False
        self._ends_early = False  # whether the last epoch has ended before its last batch
        self._step_began: float | None = None
        self._step_ended: float | None = None  # of the newest one since the loop over the batches began
        self._left: float | None = None
        self._save_began: float | None = None

    def expect_save(self, seconds: float) -> None:
        """Set the expected seconds of a save, until one is measured."""
        if not self._measured_save:
            self._save_s = seconds

    def expect_tail(self, seconds: float | None) -> None:
        """Set the expected seconds of a tail, until one is measured; None: unknown."""
        if not self._measured_tail:
            self.tail_s = seconds

    @property
    def tail_is_long(self) -> bool:
        """Whether the next tail is worth a checkpoint before it: it is long, or of unknown length."""
        return self.tail_s is None or self.tail_s > _LONG_TAIL_S

    def step_began(self) -> None:
        """The loop over the batches begins."""
        self._step_began, self._step_ended, self._left = self._clock(), None, None

    def loop_left(self) -> None:
        """The loop over the batches was left."""
        self._left = self._clock()

    def step_ended(self, *, in_tail: bool = False) -> None:
        """An optimizer step was made. `in_tail`: it was counted in the tail that began when the loop was left.

        The first of an attempt does not count: it compiles, tunes and fills caches, once.
        """
        now = self._left if in_tail and self._left is not None else self._clock()
        if self._step_began is not None and self.steps:
            self._step_s.append(now - self._step_began)
            self.training_s += now - self._step_began
        self.steps += 1
        self._step_began = self._step_ended = now

    def tail_ended(self, *, early: bool = False) -> None:
        """The body of the loop has ended, after a step. `early`: some batches of the epoch were not taken."""
        if self._step_ended is not None:
            tail_s = self._clock() - self._step_ended
            self.tail_s = max(self.tail_s or 0.0, tail_s) if self._measured_tail else tail_s
            self._measured_tail, self._ends_early = True, early
        self._step_ended = None

    def save_began(self) -> None:
        self._save_began = self._clock()

    def training_resumed(self) -> None:
        """Start the step's clock anew, after a save or beside it: the time up to here belongs to no step."""
        self._step_began = self._clock()

    def save_ended(self, seconds: float) -> None:
        """A save took this long. If it was not written beside the training, it is no part of a step."""
        self._save_s = max(self._save_s, seconds) if self._measured_save else seconds
        self._measured_save = True
        self._save_began = None

    def needed_s(self, steps: int = STEPS_UNTIL_AGREED, *, tail: bool = False) -> float:
        """Seconds for a safe end after so many more steps, the last of which has a `tail` or not.

        Ranks agree one step late, so that two steps, as the slowest of the last 100, have to fit; then what is still
        being written, and one more save. An epoch that ends early does so after any step.
        """
        tail_s = (self.tail_s or 0.0) if tail or (self._ends_early and steps) else 0.0
        saves_s = self._save_s
        if self._save_began is not None:
            elapsed = self._clock() - self._save_began
            saves_s = max(self._save_s, elapsed)
            saves_s += saves_s - elapsed
        return steps * max(self._step_s, default=0.0) + tail_s + _SAVE_ALLOWANCE * saves_s + _MARGIN_S


class StopWatch:
    """Looks for this rank's reasons to stop: a signal, or no time for more steps and a save, by its `pace`."""

    def __init__(
        self,
        signals: SignalFlag,
        deadline: float | None,
        pace: Pace | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
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
        flags = (self._signals.received.name,) if self._signals.received is not None else ()
        if self.deadline is not None and self._now() + self.pace.needed_s(steps, tail=tail) > self.deadline:
            flags = (DEADLINE, *flags)
        return flags
