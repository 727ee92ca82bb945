"""The same tensors on every data rank, of whatever type."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcddp.training.parallel.layout import Layout


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, (bytes,): gloo does not take every type."""
    return tensor.view(-1).view(torch.uint8)


@torch.no_grad()
def spread_weights(model: nn.Module, device: torch.device, layout: Layout) -> None:
    """The weights and buffers of rank 0 on every rank, as DDP does it for what is trained. A collective.

    A model on torch's device "meta" has none; a DTensor is divided already.
    """
    if layout.world_size == 1:
        return
    all_share = layout.model_size > 1  # then the first rank of all has the weights
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_meta or type(tensor.detach()) is not Tensor or not tensor.numel():
            continue
        there = tensor.detach().to(device).contiguous()
        src, group = (0, None) if all_share else (layout.data_ranks[0], layout.data_group)
        dist.broadcast(as_bytes(there), src=src, group=group)
        tensor.copy_(there)
