"""The ways to distribute a model over the ranks, and what each provides to the gradients."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import nn

from hpcddp.errors import RequestError
from hpcddp.parallelism import Split
from hpcddp.training.parallel.layout import Layout
from hpcddp.training.parallel.placing import place
from hpcddp.training.parallel.replicated import ReplicatedModel
from hpcddp.training.parallel.sharded import ShardedModel, Wanted
from hpcddp.training.rendezvous.group import Group
from hpcddp.training.torch_compat import is_compiled, uncompiled


class ParallelModel(Protocol):
    """One model of the run, distributed over the ranks."""

    @property
    def module(self) -> nn.Module:
        """The model as the training loop is to use it."""

    @property
    def forward_is_collective(self) -> bool:
        """Whether a forward pass is a collective."""

    @property
    def replaced(self) -> Sequence[weakref.ref[nn.Parameter]]:
        """The model's former parameters, which an optimizer must not hold."""

    def passes(self, *, exchange: bool) -> AbstractContextManager[None]:
        """The context of one forward and backward pass; gradients are averaged in it only with `exchange`."""


def check_wanted(split: Split, wanted: Wanted) -> None:
    """RequestError for what means nothing with this split."""
    if wanted.blocks is not None and not split.is_sharded:
        raise RequestError(
            f"parallel {split.kind} takes no blocks: each rank has the whole model", 'hpcddp.runtime(parallel="fsdp")'
        )
    if wanted.tensor_plan is not None and split.tensor == 1 and not split.is_sharded:
        raise RequestError(
            f"parallel {split.kind} takes no tensor_plan: each rank computes whole layers",
            'hpcddp.runtime(parallel={"shard": -1, "tensor": 2}), or the plan as the model\'s attribute tensor_plan',
        )


def check_uncompiled(model: nn.Module, split: Split) -> None:
    """RequestError for a compiled model whose layers this split changes: torch.compile keeps what it has seen."""
    if split.tensor > 1 and is_compiled(model):
        raise RequestError(
            f"parallel {split} divides the layers of a model, and this {type(uncompiled(model)).__name__} has been"
            " given to torch.compile",
            'leave out torch.compile; or hpcddp.runtime(parallel="fsdp"), which takes compiled models',
        )


def split_model(model: nn.Module, group: Group, layout: Layout, split: Split, wanted: Wanted) -> ParallelModel:
    """The model on the group's device, or on several of the rank's, over the ranks. A collective."""
    if not split.is_sharded:
        return ReplicatedModel(place(model, group.device), group.device, layout, wanted.options)
    return ShardedModel(model, group, layout, split, wanted)
