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
    """The weights and buffers of data rank 0 on every data rank, as DDP does it for what is trained. A collective.

    A model on torch's device "meta" has none; a DTensor is divided already.
    """
    if layout.data_size == 1:
        return
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_meta or type(tensor.detach()) is not Tensor or not tensor.numel():
            continue
        there = tensor.detach().to(device).contiguous()
        dist.broadcast(as_bytes(there), src=layout.data_ranks[0], group=layout.data_group)
        tensor.copy_(there)
