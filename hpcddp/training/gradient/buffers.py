"""Buffers, such as BatchNorm's running statistics, which differ between data ranks: DDP does not broadcast them.

Training does not use them. They are averaged only where they are read: before an evaluation and in a checkpoint. A
running mean is linear in its input, so the mean over the ranks equals that of one process over all samples. (Variances
lack the spread between ranks, as in every DDP without SyncBatchNorm.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from hpcddp.training.parallel.layout import Layout
from hpcddp.training.torch_compat import NormWithStatistics


def average_buffers(model: nn.Module, layout: Layout) -> None:
    """Average floating-point buffers over the data ranks, in place; the others are the same on all of them.

    The difference from data rank 0 is averaged, so that a number that is the same everywhere stays the same to the last
    bit. A collective.
    """
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if layout.data_size == 1 or not buffers:
        return
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


def _list_norms(model: nn.Module) -> list[nn.Module]:
    """SyncBatchNorm is left as it is: in training it waits for all ranks, so that one rank alone cannot skip it."""
    norms = [layer for layer in model.modules() if isinstance(layer, NormWithStatistics)]
    return [layer for layer in norms if not isinstance(layer, nn.SyncBatchNorm)]


@contextmanager
def frozen_statistics(model: nn.Module) -> Iterator[None]:
    """BatchNorm and InstanceNorm layers use their running statistics, for a micro batch that does not count."""
    modes = [(layer, layer.training) for layer in _list_norms(model)]
    for layer, _ in modes:
        layer.eval()
    try:
        yield
    finally:
        for layer, mode in modes:
            layer.train(mode)


@contextmanager
def unchanged_statistics(model: nn.Module) -> Iterator[None]:
    """Put the running statistics back behind the body, also where the loop calls `model.train()` in it."""
    before = [(buffer, buffer.clone()) for layer in _list_norms(model) for buffer in layer.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.copy_(value)
