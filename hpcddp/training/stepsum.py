"""The one small sum over the ranks per step: the loss, and whether anybody has to stop. Nobody waits for it."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpcddp.training.group import Group
from hpcddp.training.reduction import LaggedSum
from hpcddp.training.stopping import STOP_FLAGS


class StepNews(NamedTuple):
    """What became known about a step: `numbers` as noted, with the global loss; `stop` is a reason to stop, or None."""

    numbers: dict[str, Any]
    stop: str | None


class StepSum:
    """Collects a step's loss on the device and exchanges it with the stop flags."""

    def __init__(self, group: Group) -> None:
        self._sum = LaggedSum(group.world_size)
        self._loss = torch.zeros(1, dtype=torch.float64, device=group.device)
        self._no_flags = torch.zeros(len(STOP_FLAGS), dtype=torch.float64, device=group.device)
        self._notes: dict[str, Any] = {}
        self._last_time = time.monotonic()

    def add_loss(self, mean_loss: Tensor, part: float) -> None:
        """Add a micro batch's mean loss by its part of the global batch; stays on the device."""
        self._loss.add_(mean_loss, alpha=part)

    def exchange(self, samples: int, flags: tuple[str, ...], **notes: Any) -> StepNews | None:
        """Send off this step's sums, and what is to be noted with them; return the news of the step before."""
        news = self.drain()
        votes = self._no_flags
        if flags:
            votes = torch.tensor([float(f in flags) for f in STOP_FLAGS], dtype=torch.float64, device=votes.device)
        self._sum.push(torch.cat((self._loss, votes)))
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
        stop = next((flag for flag, votes in zip(STOP_FLAGS, numbers[1:], strict=True) if votes), None)
        return StepNews({**self._notes, "loss": numbers[0]}, stop)
