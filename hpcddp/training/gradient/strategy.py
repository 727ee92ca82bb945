"""Models in parts: each rank holds a part of every parameter, of its gradient and of the optimizer's numbers (FSDP2).

Torch's `fully_shard` gathers a block's parameters before its forward and backward pass and hands each rank its part of
the mean gradient afterwards: the mean over ranks, as in DDP, so that micro batches weigh what they weigh there.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from hpcddp.errors import RequestError, nearest
from hpcddp.training.bringup.group import Group

STRATEGIES = ("ddp", "fsdp", "hsdp")
Blocks = type[nn.Module] | tuple[type[nn.Module], ...]


def check_strategy(strategy: str, blocks: Blocks | None, *, exact: bool, noise: bool) -> None:
    """RequestError for an unknown strategy, and for what does not go with it."""
    if strategy not in STRATEGIES:
        hint = f"choose one of {', '.join(STRATEGIES)}{nearest(strategy, list(STRATEGIES))}"
        raise RequestError(f"strategy={strategy!r} is no way to share a model", hint)
    if strategy == "ddp":
        if blocks is not None:
            raise RequestError("strategy ddp takes no blocks: each rank has the whole model", 'strategy="fsdp"')
        return
    if exact:
        raise RequestError(f"exact mode needs whole gradients, and strategy {strategy} has parts", 'strategy="ddp"')
    if noise:
        raise RequestError(
            f"the gradient noise scale needs whole gradients, and strategy {strategy} has parts", "noise_every=None"
        )


def shard_model(
    model: nn.Module, group: Group, strategy: str, blocks: Blocks | None, options: dict[str, Any]
) -> list[weakref.ref[nn.Parameter]]:
    """Split the model in place, on the group's device; returns the parameters that were replaced, as far as they live.

    Each module of a class in `blocks` is gathered on its own; what is left, or all without `blocks`, in one piece.
    `options` are `fully_shard`'s own. All ranks start from rank 0's numbers.
    """
    from torch.distributed.fsdp import fully_shard

    mesh = make_mesh(group, strategy)
    before = [weakref.ref(parameter) for parameter in model.parameters()]
    _spread(model, group.device)
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
        raise RequestError(f"strategy {strategy} cannot split this model: {error}", 'strategy="ddp"') from error
    return before


def make_mesh(group: Group, strategy: str) -> Any:
    """The ranks in a row for fsdp; for hsdp one row per node: parts within a node, copies over the nodes."""
    from torch.distributed.device_mesh import DeviceMesh

    if strategy == "fsdp":
        return DeviceMesh(group.device.type, list(range(group.world_size)), mesh_dim_names=("shard",))
    rows = [[member.rank for member in group.members if member.host == host] for host in group.hosts]
    if len({len(row) for row in rows}) > 1:
        counts = ", ".join(f"{len(row)} on {host}" for row, host in zip(rows, group.hosts, strict=True))
        raise RequestError(
            f"strategy hsdp needs as many ranks on each node; there are {counts}",
            'strategy="fsdp", or nodes with the same number of ranks',
        )
    return DeviceMesh(group.device.type, rows, mesh_dim_names=("replicate", "shard"))


def check_optimizers(objects: dict[str, Any], replaced: Iterable[weakref.ref[nn.Parameter]]) -> None:
    """RequestError for an optimizer that holds parameters from before the split, and would train nothing."""
    stale = {id(parameter) for ref in replaced if (parameter := ref()) is not None}
    for name, thing in objects.items():
        if isinstance(thing, Optimizer) and any(id(p) in stale for g in thing.param_groups for p in g["params"]):
            raise RequestError(
                f"{name} was made before rt.wrap(), which gave the model other parameters: it would train nothing",
                "make the optimizer after rt.wrap(model, strategy=…)",
            )


@torch.no_grad()
def _spread(model: nn.Module, device: torch.device) -> None:
    """Rank 0's numbers on every rank, as DDP does it; a model on torch's device "meta" has none."""
    for tensor in [*model.parameters(), *model.buffers()]:
        if not tensor.is_meta:
            there = tensor.detach().to(device)
            dist.broadcast(there, src=0)
            tensor.copy_(there)
