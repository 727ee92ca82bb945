"""The ways to distribute a model over the ranks, by name, and what each provides to the gradients."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import nn

from hpcddp.errors import RequestError, nearest
from hpcddp.training.parallel.layout import Layout
from hpcddp.training.parallel.replicated import ReplicatedModel
from hpcddp.training.parallel.sharded import Blocks, ShardedModel
from hpcddp.training.rendezvous.group import Group

STRATEGIES = ("ddp", "fsdp", "hsdp")


class ParallelModel(Protocol):
    """One model of the run, distributed over the ranks."""

    @property
    def module(self) -> nn.Module:
        """The model as the training loop is to use it."""

    @property
    def meets_in_forward(self) -> bool:
        """Whether a forward pass is a collective."""

    @property
    def replaced(self) -> Sequence[weakref.ref[nn.Parameter]]:
        """The model's former parameters, which an optimizer must not hold."""

    def passes(self, *, exchange: bool) -> AbstractContextManager[None]:
        """The context of one forward and backward pass; gradients are averaged in it only with `exchange`."""


def has_whole_gradients(strategy: str) -> bool:
    """Whether each rank holds every parameter with its whole gradient."""
    return strategy == "ddp"


def check_strategy(strategy: str, blocks: Blocks | None, *, exact: bool, noise: bool) -> None:
    """RequestError for an unknown strategy, and for options that it does not support."""
    if strategy not in STRATEGIES:
        hint = f"choose one of {', '.join(STRATEGIES)}{nearest(strategy, list(STRATEGIES))}"
        raise RequestError(f"strategy={strategy!r} is unknown", hint)
    if has_whole_gradients(strategy):
        if blocks is not None:
            raise RequestError(f"strategy {strategy} takes no blocks: each rank has the whole model", 'strategy="fsdp"')
        return
    if exact:
        raise RequestError(f"exact mode needs whole gradients, and strategy {strategy} shards them", 'strategy="ddp"')
    if noise:
        raise RequestError(
            f"the gradient noise scale needs whole gradients, and strategy {strategy} shards them", "noise_every=None"
        )


def split_model(
    model: nn.Module, group: Group, layout: Layout, strategy: str, blocks: Blocks | None, options: dict[str, Any]
) -> ParallelModel:
    """The model on the group's device under a strategy that `check_strategy` accepted. A collective."""
    if strategy == "ddp":
        return ReplicatedModel(model.to(group.device), group.device, layout, options)
    return ShardedModel(model, group, layout, strategy, blocks, options)
