"""Buffers that change in a forward pass, such as BatchNorm's running statistics, in an exact run.

Every slice starts from the buffers as they were at the step's start, and the step adds the mean of the slices' changes:
one update per step, the same on every rank. So they depend on the slices and not on who computed them, and a buffer
that does not change stays as it is to the last bit.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hpcddp.training.data.sampler import MicroBatch
from hpcddp.training.gradient.slice_sum import IntegerSum, TreeSum
from hpcddp.training.torch_compat import NormWithStatistics


class SliceBuffers:
    """The buffers of all models of a run. `end_slice` is a collective with the last slice of a step."""

    def __init__(self, changes: TreeSum | IntegerSum, slices: int) -> None:
        self._changes = changes
        self._slices = slices
        self._buffers: list[Tensor] = []
        self._start: list[Tensor] = []

    def watch(self, model: nn.Module, *, statistics_only: bool = False) -> None:
        """Take a model's buffers in, or only those with running statistics; flags (bool) are left alone."""
        layers = [m for m in model.modules() if isinstance(m, NormWithStatistics)] if statistics_only else [model]
        buffers = dict.fromkeys(buffer for layer in layers for buffer in layer.buffers())
        self._buffers += [buffer for buffer in buffers if buffer.dtype != torch.bool and buffer.numel()]

    def begin_step(self) -> None:
        self._changes.clear()
        self._start = [buffer.detach().clone() for buffer in self._buffers]

    def end_slice(self, micro: MicroBatch) -> None:
        """Note what this slice changed, and undo it; with the rank's last one, make the step's change."""
        if not self._buffers:
            return
        pairs = list(zip(self._buffers, self._start, strict=True))
        flat = torch.cat([(buffer.double() - start.double()).reshape(-1) for buffer, start in pairs])
        for buffer, start in pairs:
            buffer.copy_(start)
        sizes = [start.numel() for start in self._start]
        views = list(torch.split(flat, sizes))
        if not micro.last:
            self._changes.add(views)
            return
        # slices without samples changed nothing
        mean = self._changes.total(range(len(views)), views, flat) / min(self._slices, micro.total)
        for buffer, change in zip(self._buffers, torch.split(mean, sizes), strict=True):
            buffer.copy_(buffer.double() + change.view_as(buffer))
