"""Replicated models: each data rank holds the whole model, and torch's DDP averages the gradients."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpcddp.training.parallel.layout import Layout
from hpcddp.training.parallel.placing import list_accelerators
from hpcddp.training.torch_compat import NO_BUFFER_BROADCAST


def wrap_ddp(
    model: nn.Module, device: torch.device, layout: Layout, options: dict[str, Any]
) -> DistributedDataParallel:
    """Torch's DDP over the data ranks. Its buffers are not broadcast at each forward pass, unless `options` say so."""
    defaults: dict[str, Any] = {**NO_BUFFER_BROADCAST, "gradient_as_bucket_view": True}
    if device.type == "cuda" and len(list_accelerators(model)) < 2:  # DDP takes no list for a model on several
        defaults["device_ids"] = [device.index]
    if layout.data_group is not None:
        defaults["process_group"] = layout.data_group
    return DistributedDataParallel(model, **(defaults | options))


class ReplicatedModel:
    """A model on its device, in DDP."""

    forward_is_collective = False
    replaced = ()

    def __init__(self, model: nn.Module, device: torch.device, layout: Layout, options: dict[str, Any]) -> None:
        self._wrapper = wrap_ddp(model, device, layout, options)
        self.module: nn.Module = self._wrapper

    def passes(self, *, exchange: bool) -> AbstractContextManager[None]:
        """See `ParallelModel`."""
        return nullcontext() if exchange else self._wrapper.no_sync()
