"""How often to save where the caller leaves it to the run: Daly's interval, from measured saves.

J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006, equation 37; its first
term is Young's of 1974, sqrt(2 * save * time between failures). How often nodes fail is assumed, 6.5 failures per 1000
node-days as on Meta's larger research cluster of A100 (arXiv 2410.21680), until the run itself has seen two losses.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from hpcddp.runs.losses import Losses
from hpcddp.units import format_count

NODE_FAILURE_S = 86400 * 1000 / 6.5  # mean time between the failures of one node
_SAY_AGAIN = 2.0  # times longer or shorter than what was said
_ENOUGH = 2  # losses, of which one alone says nothing
_WORTH_S = 1.0  # that a save holds the training, before one beside it is tried

#: The forms of checkpoints that are tried: as usual, and written while the training goes on.
USUAL, BESIDE = None, "async"

_NO_LOSSES = Losses()


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
    """When rank 0 asks for a save, and in which form. The interval follows the mean of the saves so far."""

    def __init__(
        self,
        nodes: int,
        losses: Losses = _NO_LOSSES,
        may_write_beside: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`losses`: that the run has seen. `may_write_beside`: whether there is memory for a copy of the state; it is
        asked once. `clock` is in seconds."""
        self._nodes, self._losses = nodes, losses
        self._failure_s = NODE_FAILURE_S / nodes
        self._has_seen = losses.times >= _ENOUGH and losses.seconds / losses.times < self._failure_s
        if self._has_seen:
            self._failure_s = max(losses.seconds / losses.times, 1.0)
        self._may_write_beside = may_write_beside
        self._has_room: bool | None = None
        self._clock = clock
        self._guess_s = 0.0
        self._held_s: dict[str | None, list[float]] = {USUAL: [], BESIDE: []}  # by the saves of this attempt
        self._since = clock()
        self._said_s: float | None = None

    def expect(self, save_s: float) -> None:
        """What a save is taken for until one was measured."""
        self._guess_s = save_s

    def training_begins(self) -> None:
        """The first step begins."""
        self._since = self._clock()

    def saved(self, held_s: float, form: str | None = USUAL) -> None:
        """A save of this form has held the training for this long."""
        self._held_s[form].append(held_s)
        self._since = self._clock()

    @property
    def form(self) -> str | None:
        """Of the next save: first as usual, then beside the training if that is worth it, then what holds it less."""
        usual, beside = self._held_s[USUAL], self._held_s[BESIDE]
        if beside:
            return BESIDE if not usual or _mean(beside) < _mean(usual) else USUAL
        if not usual or _mean(usual) < _WORTH_S:
            return USUAL
        if self._has_room is None:
            self._has_room = self._may_write_beside()
        return BESIDE if self._has_room else USUAL

    @property
    def save_s(self) -> float:
        """How long a save holds the training."""
        held_s = self._held_s[self.form] or self._held_s[USUAL]
        return _mean(held_s) if held_s else self._guess_s

    @property
    def seconds(self) -> float:
        """Of training between two saves."""
        return choose_interval_s(self.save_s, self._failure_s)

    @property
    def is_due(self) -> bool:
        """Whether it is time to save."""
        return self._clock() - self._since >= self.seconds

    def look(self, say: Callable[[str], None]) -> bool:
        """Whether it is time to save; how often it is, is said if that is new."""
        if (line := self.describe()) is not None:
            say(line)
        return self.is_due

    def describe(self) -> str | None:
        """A line on the interval; None as long as it is about what was said last."""
        now, said = self.seconds, self._said_s
        if said is not None and said / _SAY_AGAIN <= now <= said * _SAY_AGAIN:
            return None
        self._said_s = now
        loss = estimate_loss(now, self.save_s, self._failure_s)
        kind = "takes" if self._held_s[USUAL] else "may take"
        if self.form == BESIDE:
            kind = "is written beside the training and holds it for"
        fails = f"{format_count(self._nodes, 'node')} may fail once in {_format_time(self._failure_s)}"
        if self._has_seen:
            seen = format_count(self._losses.times, "time")
            fails = f"the run has lost ranks {seen} in {_format_time(self._losses.seconds)} of training"
        return (
            f"save_every='auto': a checkpoint every {_format_time(now)}, since a save {kind} {self.save_s:.2g} s and"
            f" {fails}; saves and lost steps would cost {100 * loss:.2g}% of the time"
        )


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def _format_time(seconds: float) -> str:
    """In the largest unit of which there are two."""
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.2g} seconds"
