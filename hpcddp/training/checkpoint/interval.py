"""How often to save where the caller leaves it to the run: Daly's interval, from measured saves.

J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006, equation 37; its first
term is Young's of 1974, sqrt(2 * save * time between failures). How often nodes fail is not measured but assumed: 6.5
failures per 1000 node-days, as on Meta's larger research cluster of A100 (arXiv 2410.21680).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from hpcddp.units import format_count

NODE_FAILURE_S = 86400 * 1000 / 6.5  # mean time between the failures of one node
_SAY_AGAIN = 2.0  # times longer or shorter than what was said


def choose_interval_s(save_s: float, failure_s: float) -> float:
    """Seconds of training between two saves of `save_s`, with a failure every `failure_s` seconds on average, that lose
    the least time."""
    if save_s >= 2 * failure_s:
        return failure_s
    ratio = save_s / (2 * failure_s)
    return math.sqrt(2 * save_s * failure_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def estimate_loss(interval_s: float, save_s: float, failure_s: float) -> float:
    """The share of the time that goes into saves and into steps that a failure makes anew: half an interval each."""
    whole_s = interval_s + save_s
    return save_s / whole_s + whole_s / (2 * failure_s)


class SaveInterval:
    """When rank 0 asks for a save. The interval follows the mean of the saves so far. `clock` is in seconds."""

    def __init__(self, nodes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._nodes = nodes
        self._failure_s = NODE_FAILURE_S / nodes
        self._clock = clock
        self._guess_s = 0.0
        self._saves_s = 0.0  # of all saves of this attempt together
        self._saves = 0
        self._since = clock()
        self._said_s: float | None = None

    def expect(self, save_s: float) -> None:
        """What a save is taken for until one was measured."""
        self._guess_s = save_s

    def training_begins(self) -> None:
        """The first step begins."""
        self._since = self._clock()

    def saved(self, held_s: float) -> None:
        """A save has held the training for this long."""
        self._saves_s += held_s
        self._saves += 1
        self._since = self._clock()

    @property
    def save_s(self) -> float:
        """How long a save holds the training."""
        return self._saves_s / self._saves if self._saves else self._guess_s

    @property
    def seconds(self) -> float:
        """Of training between two saves."""
        return choose_interval_s(self.save_s, self._failure_s)

    @property
    def is_due(self) -> bool:
        """Whether it is time to save."""
        return self._clock() - self._since >= self.seconds

    def describe(self) -> str | None:
        """A line on the interval; None as long as it is about what was said last."""
        now, said = self.seconds, self._said_s
        if said is not None and said / _SAY_AGAIN <= now <= said * _SAY_AGAIN:
            return None
        self._said_s = now
        loss = estimate_loss(now, self.save_s, self._failure_s)
        kind = "takes" if self._saves else "may take"
        return (
            f"save_every='auto': a checkpoint every {_format_time(now)}, since a save {kind} {self.save_s:.2g} s and"
            f" {format_count(self._nodes, 'node')} may fail once in {_format_time(self._failure_s)}; saves and lost"
            f" steps would cost {100 * loss:.2g}% of the time"
        )


def _format_time(seconds: float) -> str:
    """In the largest unit of which there are two."""
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.2g} seconds"
