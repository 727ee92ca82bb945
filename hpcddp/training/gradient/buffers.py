"""BatchNorm's running statistics, which DDP leaves different on every rank when it does not broadcast them at each
step.

Training does not use them, so they are brought together only where somebody reads them: before an evaluation and in a
checkpoint. A running mean is linear in what it saw, so the mean over the ranks is what one process over all of it would
keep (for the means; variances lack the spread between ranks, as in every DDP without SyncBatchNorm).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def average_buffers(model: nn.Module, world_size: int) -> None:
    """Average floating-point buffers over the ranks, in place; the others are alike on all ranks.

    What is alike on all ranks stays so to the last bit: what is averaged is the distance from rank 0. A collective:
    call it on every rank.
    """
    if world_size == 1:
        return
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if not buffers:
        return
    flat = torch.cat([buffer.detach().reshape(-1).double() for buffer in buffers])
    first = flat.clone()
    dist.broadcast(first, src=0)
    apart = torch.where(flat == first, 0.0, flat - first)  # infinities, as in masks, are alike but have no difference
    dist.all_reduce(apart)
    flat = torch.where(apart == 0, first, first + apart / world_size)
    for buffer, part in zip(buffers, torch.split(flat, [buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(part.view_as(buffer))


@contextmanager
def frozen_statistics(model: nn.Module) -> Iterator[None]:
    """BatchNorm layers use and keep their running statistics: for a micro batch that counts for nothing.

    Not SyncBatchNorm: in training it waits for all ranks, so one rank alone cannot leave it out.
    """
    layers = [
        layer
        for layer in model.modules()
        if isinstance(layer, _BatchNorm) and not isinstance(layer, nn.SyncBatchNorm) and layer.training
    ]
    for layer in layers:
        layer.eval()
    try:
        yield
    finally:
        for layer in layers:
            layer.train()
