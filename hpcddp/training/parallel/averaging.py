"""The mean of gradients over the data ranks, once all of a step are there.

DDP adds them up during the last backward pass. In a pipeline forward and backward passes of several micro batches take
turns, which DDP does not follow.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from hpcddp.training.parallel.layout import Layout

_CHUNK = 1 << 24  # numbers that are added up at once


@torch.no_grad()
def average_gradients(trained: Sequence[nn.Parameter], layout: Layout) -> None:
    """A parameter without a gradient on a rank counts as zero there, and stays without one if no rank has one.

    If no rank has any, since no part of the global batch counts, all are zero, as in one process. A collective.
    """
    counts = torch.tensor([float(p.grad is not None) for p in trained], device=trained[0].device)
    if layout.data_size > 1:
        dist.all_reduce(counts, group=layout.data_group)
    found = counts.tolist()
    used = [p for p, count in zip(trained, found, strict=True) if count or not any(found)]
    for parameter in used:
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    for chunk in _chunks(used) if layout.data_size > 1 else ():
        gradients = [parameter.grad for parameter in chunk if parameter.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat, group=layout.data_group)
        flat /= layout.data_size
        for gradient, part in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))


def _chunks(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters of one type each, in pieces of about `_CHUNK` numbers."""
    chunks: list[list[nn.Parameter]] = []
    left = 0
    for parameter in sorted(parameters, key=lambda p: str(p.dtype)):
        if not chunks or left <= 0 or chunks[-1][0].dtype != parameter.dtype:
            chunks.append([])
            left = _CHUNK
        chunks[-1].append(parameter)
        left -= parameter.numel()
    return chunks
