"""Sharded models (FSDP2): each rank holds a shard of every parameter, of its gradient and of the optimizer state.

Torch's `fully_shard` gathers a block's parameters before its forward and backward pass, and gives each rank its shard
of the mean gradient afterwards. It is the mean over data ranks, as in DDP, so that micro batches have the same weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from hpcddp.errors import RequestError
from hpcddp.parallelism import Split
from hpcddp.training.parallel.layout import Layout, spread_weights
from hpcddp.training.parallel.tensor import TensorPlan, check_even, check_untied, divide_layers, find_plan
from hpcddp.training.rendezvous.group import Group

Blocks = type[nn.Module] | tuple[type[nn.Module], ...]


class WrapOptions(NamedTuple):
    """Options of `rt.wrap`: classes of layers that are gathered on their own, the layers that tensor ranks divide, and
    options of `fully_shard` or DDP."""

    blocks: Blocks | None
    tensor_plan: TensorPlan | None
    options: dict[str, Any]


class ShardedModel:
    """A model whose parameters, gradients and optimizer state are sharded over the data ranks, in place on the device;
    its layers may be divided over tensor ranks before.

    Each module of a class in `blocks` is gathered on its own; the rest, or everything without `blocks`, in one piece.
    All ranks start from the weights of rank 0.
    """

    def __init__(self, model: nn.Module, group: Group, layout: Layout, split: Split, wanted: WrapOptions) -> None:
        self.module = model
        self._replaced = [weakref.ref(parameter) for parameter in model.parameters()]
        self._is_sharded = layout.data_size > 1
        units = _find_units(model, wanted.blocks)
        plan = find_plan(model, wanted.tensor_plan) if split.tensor > 1 else {}
        spread_weights(model, group.device, layout)
        data_mesh, tensor_mesh = make_meshes(group, layout, split)
        if split.tensor > 1:
            check_untied(model)
            divide_layers(model.to(group.device), tensor_mesh, plan)
            check_even(model, len(split.rows[0]), split.tensor)
        if self._is_sharded:
            _shard(model, data_mesh, split, units, wanted.options)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes in the body average no gradients, as DDP's `no_sync`."""
        sharded: Any = self.module  # `fully_shard` has given it its methods
        if self._is_sharded:
            sharded.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            if self._is_sharded:
                sharded.set_requires_gradient_sync(True)

    def hand_over(self, optimizers: Iterable[Optimizer]) -> None:
        """Give optimizers without a state the model's parameters in place of those that it had before."""
        now = zip(self._replaced, self.module.parameters(), strict=True)
        sharded = {id(before): parameter for ref, parameter in now if (before := ref()) is not None}
        for optimizer in optimizers:
            for group in optimizer.param_groups if not optimizer.state else ():
                group["params"][:] = [sharded.get(id(p), p) for p in group["params"]]  # LBFGS and wrappers share it

    def check_optimizers(self, objects: dict[str, Any]) -> None:
        """RequestError for an optimizer that holds the parameters from before, and would train nothing."""
        stale = {id(parameter) for ref in self._replaced if (parameter := ref()) is not None}
        for name, tracked in objects.items():
            if isinstance(tracked, Optimizer) and any(
                id(p) in stale for g in tracked.param_groups for p in g["params"]
            ):
                raise RequestError(
                    f"{name} was made before rt.wrap(), which gave the model other parameters: it would train nothing",
                    "make the optimizer after model = rt.wrap(model); one without a state yet may also be given to the"
                    " model's own rt.prepare(model, optimizer, loader)",
                )


def _find_units(model: nn.Module, blocks: Blocks | None) -> list[nn.Module]:
    units = [module for module in model.modules() if blocks is not None and isinstance(module, blocks)]
    if blocks is not None and not units:
        kinds = blocks if isinstance(blocks, tuple) else (blocks,)
        names = " or ".join(kind.__name__ for kind in kinds)
        raise RequestError(f"the model has no {names} to make blocks of", "leave blocks out, or give its layers' class")
    return units


def _shard(model: nn.Module, mesh: Any, split: Split, units: list[nn.Module], options: dict[str, Any]) -> None:
    from torch.distributed.fsdp import fully_shard

    inner = [module for module in reversed(units) if module is not model]  # the innermost first
    try:
        for module in inner:
            if next(module.parameters(), None) is not None:
                fully_shard(module, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
    except ValueError as error:  # what torch cannot split: a parameter that is a single number
        raise RequestError(
            f"parallel {split.kind} cannot split this model: {error}", 'hpcddp.runtime(parallel="ddp")'
        ) from error


def make_meshes(group: Group, layout: Layout, split: Split) -> tuple[Any, Any]:
    """The mesh of the data ranks, and that of the tensor ranks (None if there are no others).

    The data ranks are in one row for fsdp; for hsdp one row per copy: sharded within a row, replicated over rows.
    """
    from torch.distributed.device_mesh import DeviceMesh

    names = ("shard",) if split.kind == "fsdp" else ("replicate", "shard")
    ranks = torch.tensor([[layout.ranks_of(data_rank) for data_rank in row] for row in split.rows])
    sizes = ranks.shape[2 - len(names) : 2]
    if split.tensor == 1:
        return DeviceMesh(group.device.type, ranks.reshape(sizes), mesh_dim_names=names), None
    whole = DeviceMesh(group.device.type, ranks.reshape(*sizes, split.tensor), mesh_dim_names=(*names, "tensor"))
    return whole[names], whole["tensor"]
