"""How long steps, saves and evaluations take, how much time a safe end needs, and when the next save is due."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

_REMEMBERED_STEPS = 200
_SAVE_ALLOWANCE = 1.5  # of the slowest save: file systems have worse days
_MARGIN_S = 5.0


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
        """Whether it is time to save."""
        return self._clock() - self._since >= self._interval_s


class Pace:
    """Measured times of this attempt. `clock` is in seconds, from anywhere.

    A step's time runs from the end of the step before, or from the start of the loader's loop if that came later: a
    save, an evaluation or anything else between two epochs is no part of it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.steps_shared = 1  # that the ranks agree on at once
        self.batches = 0  # that the loops over all loaders were given
        self._clock = clock
        self._step_s: deque[float] = deque(maxlen=_REMEMBERED_STEPS)
        self.training_s = 0.0  # of all steps but the first
        self._steps = 0
        self._save_s = 0.0
        self._measured_save = False
        self._epoch_end_s = 0.0
        self._step_began: float | None = None
        self._save_began: float | None = None
        self._epoch_ended: float | None = None

    def expect_save(self, seconds: float) -> None:
        """What a save is taken for until one was measured."""
        if not self._measured_save:
            self._save_s = seconds

    def step_began(self) -> None:
        """The loop over an epoch's batches begins."""
        self._step_began = self._clock()

    def step_ended(self, *, last: bool) -> None:
        """An optimizer step was made, the epoch's `last` one or not.

        The first of an attempt does not count: it compiles, tunes and fills caches, once.
        """
        now = self._clock()
        if self._step_began is not None and self._steps:
            self._step_s.append(now - self._step_began)
            self.training_s += now - self._step_began
        self._steps += 1
        self._step_began, self._epoch_ended = now, now if last else None

    def epoch_ended(self) -> None:
        """The user's work at the end of an epoch is done: usually an evaluation."""
        if self._epoch_ended is not None:
            self._epoch_end_s = max(self._epoch_end_s, self._clock() - self._epoch_ended)
        self._epoch_ended = None

    def save_began(self) -> None:
        self._save_began = self._clock()

    def training_resumed(self) -> None:
        """After a save, or beside it: the time up to here belongs to no step."""
        self._step_began = self._clock()

    def save_ended(self, seconds: float) -> None:
        """A save took this long. If it was not written beside the training, it is no part of a step."""
        self._save_s = max(self._save_s, seconds) if self._measured_save else seconds
        self._measured_save = True
        self._save_began = None

    def slow_step_s(self) -> float:
        """The 99th percentile of the last 200 steps: of fewer than 100 the slowest, so that two odd ones in 200, a
        recompilation or a hiccup of the file system, do not end a run early."""
        if not self._step_s:
            return 0.0
        return sorted(self._step_s)[math.ceil(0.99 * len(self._step_s)) - 1]

    def needed_s(self, steps_left: int) -> float:
        """Seconds for a safe end if one more step is made; `steps_left` are left of this epoch.

        Ranks agree one step late, so that two more steps have to fit, or twice the short ones that share an exchange;
        the end of the epoch if it is reached in them; then what is still being written, and one more save.
        """
        epoch_end_s = self._epoch_end_s if steps_left <= 1 else 0.0
        shared_s = 2 * (self.steps_shared - 1) * self._mean_step_s()
        return 2 * self.slow_step_s() + shared_s + epoch_end_s + _SAVE_ALLOWANCE * self._saves_s() + _MARGIN_S

    def _mean_step_s(self) -> float:
        return sum(self._step_s) / len(self._step_s) if self._step_s else 0.0

    def _saves_s(self) -> float:
        if self._save_began is None:
            return self._save_s
        elapsed = self._clock() - self._save_began
        whole = max(self._save_s, elapsed)
        return whole - elapsed + whole
