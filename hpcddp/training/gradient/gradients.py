"""How the gradients of a step's micro batches become the gradient of the global batch, here by DDP's own means.

Each micro batch is one `micro` body; what it does before and after the user's forward and backward passes is all that a
way of summing differs in. `exact.py` is the other one.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpcddp.training.bringup.group import Group
from hpcddp.training.gradient.buffers import frozen_statistics
from hpcddp.training.gradient.strategy import Blocks, check_optimizers, shard_model
from hpcddp.training.samples.sampler import MicroBatch

# the name of DDP's option changed with torch 2.15
_DDP_OPTIONS = inspect.signature(DistributedDataParallel.__init__).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _DDP_OPTIONS else "broadcast_buffers"


def wrap_ddp(model: nn.Module, device: torch.device, options: dict[str, Any]) -> DistributedDataParallel:
    """Torch's DDP with our defaults under the caller's: buffers are not broadcast at each forward pass."""
    defaults: dict[str, Any] = {_SYNC_BUFFERS: False, "gradient_as_bucket_view": True}
    if device.type == "cuda":
        defaults["device_ids"] = [device.index]
    return DistributedDataParallel(model, **(defaults | options))


class DdpGradients:
    """DDP averages over the ranks, so that a rank's weight is W * n / N; gradients travel with the last micro batch."""

    slots = 1  # numbers that the losses of a step are summed in
    buffers_differ = True  # from rank to rank, until somebody averages them

    def __init__(self, group: Group) -> None:
        self._group = group
        self._wrapped: list[DistributedDataParallel] = []
        self._split: list[Any] = []  # models in parts
        self._replaced: list[weakref.ref[nn.Parameter]] = []

    @property
    def averaged_over(self) -> int:
        """What the sum of all gradients is divided by on its way."""
        return self._group.world_size

    def wrap(self, model: nn.Module, options: dict[str, Any]) -> nn.Module:
        """The model (on its device already) as the loop is to use it: bare at world size 1."""
        if self._group.world_size == 1:
            return model
        wrapper = wrap_ddp(model, self._group.device, options)
        self._wrapped.append(wrapper)
        return wrapper

    def shard(self, model: nn.Module, strategy: str, blocks: Blocks | None, options: dict[str, Any]) -> nn.Module:
        """The model in parts over the ranks, on its device; bare at world size 1."""
        if self._group.world_size == 1:
            return model.to(self._group.device)
        self._replaced += shard_model(model, self._group, strategy, blocks, options)
        self._split.append(model)
        return model

    @property
    def meets_in_forward(self) -> bool:
        """Whether a forward pass is a collective: then all ranks need equally many."""
        return bool(self._split)

    def check(self, objects: dict[str, Any]) -> None:
        """RequestError for tracked objects that do not belong to the wrapped models."""
        check_optimizers(objects, self._replaced)

    def key(self, micro: MicroBatch) -> tuple[int, ...]:
        """What random numbers depend on, beside seed and step."""
        return self._group.rank, micro.nth

    def slot(self, _micro: MicroBatch) -> int:
        """Which of the `slots` the micro batch's loss goes into."""
        return 0

    @contextmanager
    def micro(self, micro: MicroBatch) -> Iterator[None]:
        """Around forward and backward of one micro batch."""
        with ExitStack() as stack:
            for wrapper in self._wrapped:
                if not micro.last:
                    stack.enter_context(wrapper.no_sync())
            for model in self._split:
                model.set_requires_gradient_sync(micro.last)
            if micro.samples == 0:
                for module in (*self._wrapped, *self._split):
                    stack.enter_context(frozen_statistics(module))
            yield
