"""Replicated models: each data rank holds the whole model, and torch's DDP averages the gradients."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpcddp.training.parallel.layout import Layout
from hpcddp.training.torch_compat import NO_BUFFER_BROADCAST


def wrap_ddp(
    model: nn.Module, device: torch.device, layout: Layout, options: dict[str, Any]
) -> DistributedDataParallel:
    """Torch's DDP over the data ranks. Its buffers are not broadcast at each forward pass, unless `options` say so."""
    defaults: dict[str, Any] = {**NO_BUFFER_BROADCAST, "gradient_as_bucket_view": True}
    if device.type == "cuda":
        defaults["device_ids"] = [device.index]
    if layout.data_group is not None:
        defaults["process_group"] = layout.data_group
    return DistributedDataParallel(model, **(defaults | options))


class ReplicatedModel:
    """A model on its device, in DDP."""

    meets_in_forward = False
    replaced = ()

    def __init__(self, model: nn.Module, device: torch.device, layout: Layout, options: dict[str, Any]) -> None:
        self._wrapper = wrap_ddp(model, device, layout, options)
        self.module: nn.Module = self._wrapper

    def passes(self, *, exchange: bool) -> AbstractContextManager[None]:
        """See `ParallelModel`."""
        return nullcontext() if exchange else self._wrapper.no_sync()


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
        # as bytes: gloo does not take every type
        dist.broadcast(there.view(-1).view(torch.uint8), src=layout.data_ranks[0], group=layout.data_group)
        tensor.copy_(there)
