"""Sharded models (FSDP2): each rank holds a shard of every parameter, of its gradient and of the optimizer state.

Torch's `fully_shard` gathers a block's parameters before its forward and backward pass, and gives each rank its shard
of the mean gradient afterwards. It is the mean over data ranks, as in DDP, so that micro batches have the same weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hpcddp.errors import RequestError
from hpcddp.parallelism import Split
from hpcddp.training.parallel.layout import Layout
from hpcddp.training.parallel.spread import spread_weights
from hpcddp.training.rendezvous.group import Group

Blocks = type[nn.Module] | tuple[type[nn.Module], ...]


class ShardedModel:
    """A model whose parameters, gradients and optimizer state are sharded over the data ranks, in place."""

    forward_is_collective = True

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        layout: Layout,
        split: Split,
        blocks: Blocks | None,
        options: dict[str, Any],
    ) -> None:
        self.module = model
        self.replaced = shard_model(model, group, layout, split, blocks, options)

    @contextmanager
    def passes(self, *, exchange: bool) -> Iterator[None]:
        """See `ParallelModel`."""
        sharded: Any = self.module  # `fully_shard` has given it this method
        sharded.set_requires_gradient_sync(exchange)
        yield


def shard_model(
    model: nn.Module, group: Group, layout: Layout, split: Split, blocks: Blocks | None, options: dict[str, Any]
) -> list[weakref.ref[nn.Parameter]]:
    """Shard the model in place, on the group's device; returns the replaced parameters, as weak references.

    Each module of a class in `blocks` is gathered on its own; the rest, or everything without `blocks`, in one piece.
    `options` are those of `fully_shard`. All data ranks start from the weights of data rank 0.
    """
    from torch.distributed.fsdp import fully_shard

    mesh = make_mesh(group, layout, split)
    before = [weakref.ref(parameter) for parameter in model.parameters()]
    spread_weights(model, group.device, layout)
    units = [module for module in model.modules() if blocks is not None and isinstance(module, blocks)]
    if blocks is not None and not units:
        kinds = blocks if isinstance(blocks, tuple) else (blocks,)
        names = " or ".join(kind.__name__ for kind in kinds)
        raise RequestError(f"the model has no {names} to make blocks of", "leave blocks out, or give its layers' class")
    try:
        for module in reversed(units):  # the innermost first
            if module is not model and next(module.parameters(), None) is not None:
                fully_shard(module, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
    except ValueError as error:  # what torch cannot split: a parameter that is a single number
        raise RequestError(
            f"parallel {split.kind} cannot split this model: {error}", 'hpcddp.runtime(parallel="ddp")'
        ) from error
    return before


def make_mesh(group: Group, layout: Layout, split: Split) -> Any:
    """The data ranks in one row for fsdp; for hsdp one row per copy: sharded within a row, replicated over rows."""
    from torch.distributed.device_mesh import DeviceMesh

    names = ("shard",) if split.kind == "fsdp" else ("replicate", "shard")
    ranks = torch.tensor([[layout.ranks_of(data_rank) for data_rank in row] for row in split.rows])
    sizes = [*ranks.shape[2 - len(names) : 2]]
    if layout.model_size == 1:
        return DeviceMesh(group.device.type, ranks.reshape(sizes), mesh_dim_names=names)
    whole = DeviceMesh(group.device.type, ranks.reshape([*sizes, layout.model_size]), mesh_dim_names=(*names, "model"))
    return whole[names]


def hand_over(optimizers: Iterable[Optimizer], model: nn.Module, replaced: Iterable[weakref.ref[nn.Parameter]]) -> None:
    """Give optimizers that have not stepped yet the model's parameters in place of those that were `replaced`."""
    now = zip(replaced, model.parameters(), strict=True)
    sharded = {id(before): parameter for ref, parameter in now if (before := ref()) is not None}
    for optimizer in optimizers:
        if not optimizer.state:
            for group in optimizer.param_groups:  # in place: torch's LBFGS, and wrappers, share the list
                group["params"][:] = [sharded.get(id(parameter), parameter) for parameter in group["params"]]


def check_optimizers(objects: dict[str, Any], replaced: Iterable[weakref.ref[nn.Parameter]]) -> None:
    """RequestError for an optimizer that holds the parameters from before the sharding, and would train nothing."""
    stale = {id(parameter) for ref in replaced if (parameter := ref()) is not None}
    for name, thing in objects.items():
        if isinstance(thing, Optimizer) and any(id(p) in stale for g in thing.param_groups for p in g["params"]):
            raise RequestError(
                f"{name} was made before rt.wrap(), which gave the model other parameters: it would train nothing",
                "make the optimizer after rt.wrap(model), or give both to one rt.prepare(model, optimizer, loader)",
            )
