"""The one small sum over the ranks per step: the loss, and whether anybody has to stop. Nobody waits for it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpcddp.training.bringup.group import Group
from hpcddp.training.gradient.reduction import LaggedSum
from hpcddp.training.stopping import STOP_FLAGS


class StepNews(NamedTuple):
    """What became known about a step: `numbers` as noted, with the global loss; `stop` is a reason to stop, or None."""

    numbers: dict[str, Any]
    stop: str | None
    sums: dict[str, float]  # of what else was to be added up over the ranks


class StepSum:
    """Collects a step's loss on the device and exchanges it with the stop flags.

    With several `slots`, each of which only one rank ever fills, the loss does not depend on how the ranks' sum was
    made.
    """

    def __init__(self, group: Group, slots: int = 1) -> None:
        self._sum = LaggedSum(group.world_size)
        self._slots = slots
        self._loss = torch.zeros(slots, dtype=torch.float64, device=group.device)
        self._no_flags = torch.zeros(len(STOP_FLAGS), dtype=torch.float64, device=group.device)
        self._notes: dict[str, Any] = {}
        self._names: tuple[str, ...] = ()
        self._last_time = time.monotonic()

    def add_loss(self, loss: Tensor, part: float | Tensor, slot: int = 0) -> None:
        """Add a micro batch's loss by its part of the global batch; stays on the device."""
        if isinstance(part, Tensor):
            self._loss[slot].add_(loss.double() * part)
        else:
            self._loss[slot].add_(loss, alpha=part)

    def exchange(
        self, samples: int, flags: tuple[str, ...], more: Mapping[str, Tensor | float] | None = None, **notes: Any
    ) -> StepNews | None:
        """Send off this step's sums, and what is to be noted with them; return the news of the step before.

        `more` is added up over the ranks too: the same names on every rank.
        """
        news = self.drain()
        votes = self._no_flags
        if flags:
            votes = torch.tensor([float(f in flags) for f in STOP_FLAGS], dtype=torch.float64, device=votes.device)
        also = [torch.as_tensor(v, dtype=torch.float64, device=votes.device).reshape(1) for v in (more or {}).values()]
        self._names = tuple(more or ())
        self._sum.push(torch.cat((self._loss, votes, *also)))
        self._loss.zero_()
        now = time.monotonic()
        self._notes = {**notes, "samples_per_s": round(samples / max(now - self._last_time, 1e-9), 1)}
        self._last_time = now
        return news

    def drain(self) -> StepNews | None:
        """Wait for the sums that are under way, if any."""
        numbers = self._sum.pull()
        if numbers is None:
            return None
        losses, others = numbers[: self._slots], numbers[self._slots :]
        votes, sums = others[: len(STOP_FLAGS)], others[len(STOP_FLAGS) :]
        stop = next((flag for flag, count in zip(STOP_FLAGS, votes, strict=True) if count), None)
        return StepNews({**self._notes, "loss": _add_up(losses)}, stop, dict(zip(self._names, sums, strict=True)))


def _add_up(losses: list[float]) -> float:
    """The sum, correctly rounded and so in no order."""
    return math.fsum(losses) if all(map(math.isfinite, losses)) else sum(losses)
