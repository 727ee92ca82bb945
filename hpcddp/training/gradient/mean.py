"""The mean over the data ranks, which DDP and FSDP compute during the last backward pass of a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from hpcddp.errors import RequestError
from hpcddp.parallelism import Split
from hpcddp.training.data.sampler import MicroBatch
from hpcddp.training.gradient.buffers import frozen_statistics, unchanged_statistics
from hpcddp.training.gradient.gradients import Gradients
from hpcddp.training.parallel.layout import Layout
from hpcddp.training.parallel.sameness import UsedAlike
from hpcddp.training.parallel.sharded import ShardedModel, WrapOptions
from hpcddp.training.parallel.strategy import place, split_model
from hpcddp.training.rendezvous.group import Group


class MeanGradients(Gradients):
    """A micro batch's weight is W * n / N, since torch divides the sum over the W data ranks by W."""

    takes_parts_only = True
    buffers_differ = True

    def __init__(self, group: Group, layout: Layout, split: Split) -> None:
        self._group = group
        self._split = split
        self._layout = layout
        self.averaged_over = layout.data_size
        self._models: list[DistributedDataParallel | ShardedModel] = []
        self._sharded: list[ShardedModel] = []  # those of them
        self._untrained: list[nn.Module] = []
        self._used_alike = UsedAlike(layout, group.device)

    def wrap(self, model: nn.Module, wanted: WrapOptions) -> nn.Module:
        """The model on its device; neither wrapped nor sharded on one rank."""
        if self._layout.data_size == self._split.tensor == 1:
            return place(model, self._group.device)
        split = split_model(model, self._group, self._layout, self._split, wanted)
        self._models.append(split)
        if isinstance(split, DistributedDataParallel):
            return split
        self._sharded.append(split)
        self.forward_is_collective = True
        return split.module

    def add_untrained(self, model: nn.Module) -> None:
        if self._sharded and isinstance(model, AveragedModel):
            raise RequestError(
                f"rt.prepare was given an AveragedModel with parallel {self._split.kind}: it has whole weights, and"
                " those of the model are in shards",
                "ema = rt.wrap(AveragedModel(model)), before model, optimizer, loader, ema = rt.prepare(model,"
                " optimizer, loader, ema)",
            )
        self._untrained.append(model)

    def hand_over(self, optimizers: Iterable[Optimizer]) -> None:
        optimizers = [*optimizers]
        for model in self._sharded:
            model.hand_over(optimizers)

    def check(self, objects: dict[str, Any]) -> None:
        for model in self._sharded:
            model.check_optimizers(objects)

    @contextmanager
    def micro(self, micro: MicroBatch) -> Iterator[None]:
        with ExitStack() as stack:
            for model in self._models if not micro.last else ():
                stack.enter_context(model.no_sync())
            if micro.samples == 0:
                for module in (*(model.module for model in self._models), *self._untrained):
                    stack.enter_context(unchanged_statistics(module))
                    stack.enter_context(frozen_statistics(module))
            yield

    def check_step(self) -> None:
        """Check that the ranks have gradients of the same parameters."""
        self._used_alike.check(model.module for model in self._sharded)
