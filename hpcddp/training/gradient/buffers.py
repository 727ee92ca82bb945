"""Buffers, such as BatchNorm's running statistics, which differ between data ranks: DDP does not broadcast them.

Training does not use them. They are averaged only where they are read: before an evaluation and in a checkpoint. A
running mean is linear in its input, so the mean over the ranks equals that of one process over all samples. (Variances
lack the spread between ranks, as in every DDP without SyncBatchNorm.) For other numbers a mean may be wrong, as for a
queue of vectors of length 1; that is said.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from hpcddp.training.parallel.layout import Layout
from hpcddp.training.report import print_warning
from hpcddp.training.torch_compat import NormWithStatistics


class BufferMeans:
    """Averages the buffers of a run's models, and says once that one is averaged which may not be meant to be."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._has_said = False

    def average(self, models: Iterable[nn.Module]) -> None:
        """See `average_buffers`."""
        for model in dict.fromkeys(models):
            name = average_buffers(model, self._layout)
            if name is not None and not self._has_said:
                self._has_said = True
                warning = (
                    f"the buffer {name} of {type(model).__name__} is not the same on all ranks: before an evaluation"
                    " and in a checkpoint it becomes their mean, which is meant for running statistics\nhint: fill it"
                    " on every rank with the same numbers: rt.gather(rows) first, or rt.broadcast(it)"
                )
                print_warning(warning, is_first=self._layout.rank == 0)


def average_buffers(model: nn.Module, layout: Layout) -> str | None:
    """Average floating-point buffers over the data ranks, in place; the others are the same on all of them.

    The difference from data rank 0 is averaged, so that a number that is the same everywhere stays the same to the last
    bit. A collective. Returns the name of the first one that differed, if there is any beside the running statistics of
    torch's own layers.
    """
    if layout.data_size == 1:
        return None
    named = [(name, buffer) for name, buffer in model.named_buffers() if buffer.is_floating_point()]
    buffers = [buffer for _, buffer in named]
    if not buffers:
        return None
    device = buffers[0].device  # of a model on several
    flat = torch.cat([buffer.detach().reshape(-1).double().to(device) for buffer in buffers])
    first = flat.clone()
    dist.broadcast(first, src=layout.data_ranks[0], group=layout.data_group)
    apart = torch.where(flat == first, 0.0, flat - first)  # infinities, as in masks, are equal but have no difference
    dist.all_reduce(apart, group=layout.data_group)
    flat = torch.where(apart == 0, first, first + apart / layout.data_size)
    sizes = [buffer.numel() for buffer in buffers]
    for buffer, part in zip(buffers, torch.split(flat, sizes), strict=True):
        buffer.copy_(part.view_as(buffer))
    layers = [layer for layer in model.modules() if isinstance(layer, NormWithStatistics)]
    statistics = {id(buffer) for layer in layers for buffer in layer.buffers()}
    differ = zip(named, torch.split(apart != 0, sizes), strict=True)
    return next((name for (name, buffer), part in differ if id(buffer) not in statistics and part.any()), None)


@contextmanager
def frozen_statistics(model: nn.Module) -> Iterator[None]:
    """BatchNorm and InstanceNorm layers use and keep their running statistics, for a micro batch that does not count,
    also after `model.train()` in the body, which takes effect behind it.

    SyncBatchNorm is left as it is: in training it waits for all ranks, so that one rank alone cannot skip it.
    """
    layers = [
        layer
        for layer in model.modules()
        if isinstance(layer, NormWithStatistics) and not isinstance(layer, nn.SyncBatchNorm)
    ]
    modes: dict[nn.Module, bool] = {layer: layer.training for layer in layers}
    for layer in layers:
        layer.eval()
    try:
        with _held(modes):
            yield
    finally:
        for layer in layers:
            layer.train(modes[layer])


@contextmanager
def _held(modes: dict[nn.Module, bool]) -> Iterator[None]:
    """`train` and `eval` of these layers note the mode and do nothing else.

    Their class gets the method that does so: one of the layers' own would go into copies of the model.
    """
    usual, own = NormWithStatistics.train, vars(NormWithStatistics).get("train")

    def note(layer: nn.Module, mode: bool = True) -> nn.Module:
        if layer not in modes:
            return usual(layer, mode)
        modes[layer] = mode
        return layer

    NormWithStatistics.train = note  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        if own is None:
            del NormWithStatistics.train
        else:
            NormWithStatistics.train = own  # type: ignore[method-assign]
