"""Numbers, tensors and objects of all data ranks together, outside of the training step. Call them on every rank."""

from __future__ import annotations

import zlib
from numbers import Integral, Real
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hpcddp.errors import RequestError
from hpcddp.training.parallel.layout import Layout, as_bytes, ask_all

_WIDE = (torch.int64, torch.float64, torch.complex128)
Number = TypeVar("Number", int, float, Tensor)
Thing = TypeVar("Thing")


def sum_over_data_ranks(value: Number, layout: Layout, device: torch.device) -> Number:
    """The sum over the data ranks: of whole numbers and truth values in int64, of others in float64 or complex128.

    Of a number a number (a NumPy number is one), of a tensor one of its shape. RequestError if the ranks' shapes
    differ, and in a backward pass that comes to the result. Waits for the device.
    """
    if isinstance(value, Tensor):
        return _without_gradient(_sum(value.detach(), layout, device), value, "rt.sum")
    if isinstance(value, Integral):
        if abs(int(value)) >= 2**63 // layout.data_size:
            raise RequestError(
                f"rt.sum({value}) does not fit: whole numbers are summed in 64 bits", "rt.sum(float(number))"
            )
        one = torch.tensor(int(value), dtype=torch.int64)
    elif isinstance(value, Real):
        one = torch.tensor(float(value), dtype=torch.float64)
    else:
        raise RequestError(f"a {type(value).__name__} cannot be summed", "rt.sum(number), or rt.sum(tensor)")
    return _sum(one, layout, device).item()


def _sum(mine: Tensor, layout: Layout, device: torch.device) -> Tensor:
    """Sum in the widest type of all ranks': a rank that had no sample gives the 0 that its loop began with."""
    wide = _WIDE.index(torch.int64)
    if mine.is_complex():
        wide = _WIDE.index(torch.complex128)
    elif mine.is_floating_point():
        wide = _WIDE.index(torch.float64)
    if layout.data_size > 1:
        shape = zlib.crc32(repr(tuple(mine.shape)).encode()) if mine.numel() != 1 else 0
        most = torch.tensor([wide, shape, -shape], device=device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=layout.data_group)
        wide, largest, smallest = int(most[0]), int(most[1]), -int(most[2])
        if largest != smallest:
            raise _differ_in_shape(mine, layout)
    total = mine.to(device, _WIDE[wide], copy=True)
    if layout.data_size > 1:
        dist.all_reduce(torch.view_as_real(total) if total.is_complex() else total, group=layout.data_group)
    return total


def _differ_in_shape(mine: Tensor, layout: Layout) -> RequestError:
    shapes = ask_all(tuple(mine.shape), layout.data_size, layout.data_group)
    other = next(rank for rank, shape in enumerate(shapes) if shape != shapes[0])
    return RequestError(
        f"rt.sum got another shape on each rank: {shapes[0]} on rank {layout.data_ranks[0]}, {shapes[other]} on rank"
        f" {layout.data_ranks[other]}",
        "sum tensors of one shape, as of torch.bincount(x, minlength=classes); for rows of any number: rt.gather(rows)",
    )


def gather_rows(rows: Tensor, layout: Layout, device: torch.device) -> Tensor:
    """The rows of all data ranks, one below the other by data rank: (n_0 + n_1 + …, …) from (n_r, …) on each.

    RequestError if the ranks' tensors differ in more than their number of rows, and in a backward pass that comes to
    the result.
    """
    if not isinstance(rows, Tensor):
        raise RequestError(f"a {type(rows).__name__} has no rows to gather", "rt.gather(torch.as_tensor(rows))")
    return _without_gradient(_gather(rows.detach().to(device), layout), rows, "rt.gather")


def _without_gradient(result: Tensor, mine: Tensor, call: str) -> Tensor:
    """The result of a call, through which no gradient goes back to what this rank gave. A backward pass that would
    need it is refused, where it would lose it without a word."""
    if not (mine.requires_grad and torch.is_grad_enabled()):
        return result

    def refuse(_gradient: Tensor) -> None:
        raise RequestError(
            f"the loss is computed from {call}(…), whose result has no gradient: that of this rank's own part would be"
            " lost as well",
            f"{call}(x.detach()) for the other ranks' part, and this rank's own x in the loss",
        )

    leaf = result.detach().requires_grad_()  # it keeps nothing of the forward pass in memory
    leaf.register_hook(refuse)  # type: ignore[no-untyped-call]  # torch does not annotate it
    return leaf


def _gather(mine: Tensor, layout: Layout) -> Tensor:
    if mine.dim() == 0:
        raise RequestError("a single number has no rows to gather", "rt.sum(number), or rt.gather(numbers.reshape(1))")
    if layout.data_size == 1:
        return mine
    kinds = ask_all((mine.shape[0], mine.shape[1:], mine.dtype), layout.data_size, layout.data_group)
    if any(kind[1:] != kinds[0][1:] for kind in kinds):
        shapes = ", ".join(f"{(kind[0], *kind[1])} {kind[2]}" for kind in dict.fromkeys(kinds))
        raise RequestError(f"the ranks have rows of different kinds: {shapes}", "gather rows of one shape and type")
    most = max(kind[0] for kind in kinds)
    padded = mine.new_zeros((most, *mine.shape[1:]))
    padded[: mine.shape[0]] = mine
    parts = [torch.empty_like(padded) for _ in kinds]
    dist.all_gather([as_bytes(part) for part in parts], as_bytes(padded), group=layout.data_group)
    return torch.cat([part[: kind[0]] for part, kind in zip(parts, kinds, strict=True)])


def broadcast(thing: Thing, world_size: int, device: torch.device) -> Thing:
    """Rank 0's object, on every rank. It has to be one that can be pickled."""
    things = [thing]
    if world_size > 1:
        dist.broadcast_object_list(things, src=0, device=device)
    return things[0]
