"""The one small sum over the ranks per step: the loss, and whether a rank has to stop. No rank waits for it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpcddp.training.gradient.reduction import LaggedSum
from hpcddp.training.parallel.layout import Layout
from hpcddp.training.stopping import STOP_FLAGS


class StepResult(NamedTuple):
    """The sums of a step: `numbers` of `exchange` with the global loss; `stop` is a reason to stop, or None."""

    numbers: dict[str, Any]
    stop: str | None
    sums: dict[str, float]  # of `more`


class StepSum:
    """Collects a step's loss on the device and exchanges it with the stop flags.

    All ranks take part, so that a signal to any of them stops all; of the ranks with one data rank, only the first adds
    its loss. With several `slots`, each filled by one data rank only, the loss does not depend on the order of the sum.
    On a CPU the numbers stay Python's own, since a tensor operation takes longer than all of this.
    """

    def __init__(self, layout: Layout, device: torch.device, slots: int = 1) -> None:
        self._sum = LaggedSum(layout.world_size)
        self._alone: list[float] | None = None  # the numbers that were pushed, of a single rank on a CPU
        self._is_alone = layout.world_size == 1 and device.type == "cpu"
        self._is_counted = layout.is_counted
        self._device = device
        self._slots = slots
        self._host_loss = [0.0] * slots
        self._loss = torch.zeros(slots, dtype=torch.float64, device=device)
        self._notes: dict[str, Any] = {}
        self._names: tuple[str, ...] = ()
        self._last_time = time.monotonic()

    def add_loss(self, loss: Tensor, part: float | Tensor, slot: int = 0) -> None:
        """Add a micro batch's loss by its part of the global batch; stays on the device."""
        if self._device.type == "cpu":
            self._host_loss[slot] += float(part) * float(loss)
        elif isinstance(part, Tensor):
            self._loss[slot].add_(loss.double() * part)
        else:
            self._loss[slot].add_(loss, alpha=part)

    def exchange(
        self, samples: int, flags: tuple[str, ...], more: Mapping[str, Tensor | float] | None = None, **notes: Any
    ) -> StepResult | None:
        """Start this step's sums, and return the result of the step before.

        `more` is summed over the data ranks too: the same names on every rank. `notes` are kept with the result.
        """
        before = self.drain()
        more = more or {}
        self._names = tuple(more)
        votes = [float(flag in flags) for flag in STOP_FLAGS]
        if self._device.type == "cpu":
            self._push_host(votes, [float(value) for value in more.values()])
        else:
            self._push_device(votes, list(more.values()))
        now = time.monotonic()
        self._notes = {**notes, "samples_per_s": round(samples / max(now - self._last_time, 1e-9), 1)}
        self._last_time = now
        return before

    def _push_host(self, votes: list[float], also: list[float]) -> None:
        loss, self._host_loss = self._host_loss, [0.0] * self._slots
        if not self._is_counted:
            loss, also = [0.0] * self._slots, [0.0] * len(also)
        if self._is_alone:
            self._alone = [*loss, *votes, *also]
        else:
            self._sum.push(torch.tensor([*loss, *votes, *also], dtype=torch.float64))

    def _push_device(self, votes: list[float], more: list[Tensor | float]) -> None:
        also = [torch.as_tensor(value, dtype=torch.float64, device=self._device).reshape(1) for value in more]
        loss = self._loss
        if not self._is_counted:
            loss, also = torch.zeros_like(loss), [torch.zeros_like(one) for one in also]
        self._sum.push(torch.cat((loss, self._to_device(votes), *also)))
        self._loss.zero_()

    def _to_device(self, votes: list[float]) -> Tensor:
        """Zeros are made there; others, which come once in a run, are copied."""
        if any(votes):
            return torch.tensor(votes, dtype=torch.float64, device=self._device)
        return torch.zeros(len(votes), dtype=torch.float64, device=self._device)

    def drain(self) -> StepResult | None:
        """The sums that were started last, if any; waits for them."""
        alone, self._alone = self._alone, None
        numbers = self._sum.pull() if alone is None else alone
        if numbers is None:
            return None
        losses, others = numbers[: self._slots], numbers[self._slots :]
        votes, sums = others[: len(STOP_FLAGS)], others[len(STOP_FLAGS) :]
        stop = next((flag for flag, count in zip(STOP_FLAGS, votes, strict=True) if count), None)
        return StepResult({**self._notes, "loss": _add_up(losses)}, stop, dict(zip(self._names, sums, strict=True)))


def _add_up(losses: list[float]) -> float:
    """The correctly rounded sum, which does not depend on the order."""
    return math.fsum(losses) if all(map(math.isfinite, losses)) else sum(losses)
