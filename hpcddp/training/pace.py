"""How long steps, saves and evaluations take, how much time a safe end needs, and when the next save is due."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

_REMEMBERED_STEPS = 200
_SAVE_ALLOWANCE = 1.5  # of the slowest save: file systems have worse days
_MARGIN_S = 5.0
_LONG_TAIL_S = 5.0
STEPS_UNTIL_AGREED = 2


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
    save, an evaluation or anything else between two epochs is no part of it. The tail of an epoch is what the loop's
    body does after its last step: usually an evaluation.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.steps_shared = 1  # that the ranks agree on at once
        self.batches = 0  # that the loops over all loaders were given
        self._clock = clock
        self._step_s: deque[float] = deque(maxlen=_REMEMBERED_STEPS)
        self.training_s = 0.0  # of all steps but the first
        self.steps = 0
        self._save_s = 0.0
        self._measured_save = False
        self.tail_s: float | None = None  # the longest one so far, or that of the attempt before
        self._measured_tail = False
        self._ends_early = False  # whether the last epoch has ended before its last batch
        self._step_began: float | None = None
        self._step_ended: float | None = None  # of the newest one since the loop over the batches began
        self._left: float | None = None
        self._save_began: float | None = None

    def expect_save(self, seconds: float) -> None:
        """What a save is taken for until one was measured."""
        if not self._measured_save:
            self._save_s = seconds

    def expect_tail(self, seconds: float | None) -> None:
        """What a tail is taken for until one was measured; None: it is not known."""
        if not self._measured_tail:
            self.tail_s = seconds

    @property
    def tail_is_long(self) -> bool:
        """Whether the next tail is worth a checkpoint before it, also since nothing is known of it."""
        return self.tail_s is None or self.tail_s > _LONG_TAIL_S

    def step_began(self) -> None:
        """The loop over an epoch's batches begins."""
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

    def needed_s(self, steps: int = STEPS_UNTIL_AGREED, *, tail: bool = False) -> float:
        """Seconds for a safe end after so many more steps, the last of which has a `tail` or not.

        Ranks agree one step late, so that two steps have to fit, or twice the short ones that share an exchange; then
        what is still being written, and one more save. An epoch that ends early does so after any step.
        """
        shared_s = 2 * (self.steps_shared - 1) * self._mean_step_s() if steps >= STEPS_UNTIL_AGREED else 0.0
        tail_s = (self.tail_s or 0.0) if tail or (self._ends_early and steps) else 0.0
        return steps * self.slow_step_s() + shared_s + tail_s + _SAVE_ALLOWANCE * self._saves_s() + _MARGIN_S

    def _mean_step_s(self) -> float:
        return sum(self._step_s) / len(self._step_s) if self._step_s else 0.0

    def _saves_s(self) -> float:
        if self._save_began is None:
            return self._save_s
        elapsed = self._clock() - self._save_began
        whole = max(self._save_s, elapsed)
        return whole - elapsed + whole
