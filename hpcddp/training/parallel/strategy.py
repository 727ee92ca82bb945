"""The ways to distribute a model over the ranks, and what each provides to the gradients."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import nn

from hpcddp.errors import RequestError
from hpcddp.parallelism import Split
from hpcddp.training.parallel.layout import Layout
from hpcddp.training.parallel.replicated import ReplicatedModel
from hpcddp.training.parallel.sharded import Blocks, ShardedModel
from hpcddp.training.rendezvous.group import Group


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


def check_blocks(split: Split, blocks: Blocks | None) -> None:
    """RequestError for blocks of a model that is not sharded."""
    if blocks is not None and not split.is_sharded:
        raise RequestError(
            f"parallel {split.kind} takes no blocks: each rank has the whole model", 'hpcddp.runtime(parallel="fsdp")'
        )


def split_model(
    model: nn.Module, group: Group, layout: Layout, split: Split, blocks: Blocks | None, options: dict[str, Any]
) -> ParallelModel:
    """The model on the group's device, over the data ranks. A collective."""
    if not split.is_sharded:
        return ReplicatedModel(model.to(group.device), group.device, layout, options)
    return ShardedModel(model, group, layout, split, blocks, options)
