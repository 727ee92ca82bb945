"""Numbers, tensors and objects of all ranks of a group together, outside of the training step.

Each function is a collective over so many `ranks`: the `group`'s, or all (None).
"""

from __future__ import annotations

import zlib
from numbers import Integral, Real
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hpcddp.errors import RequestError

_WIDE = (torch.int64, torch.float64, torch.complex128)  # each holds the numbers of those before it
Number = TypeVar("Number", int, float, Tensor)
Value = TypeVar("Value")


def ask_all(mine: Any, ranks: int, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather what each rank has, by its number in the group. It must be picklable."""
    everyones = [mine] * ranks
    if ranks > 1:
        dist.all_gather_object(everyones, mine, group=group)
    return everyones


def broadcast(value: Value, ranks: int, device: torch.device) -> Value:
    """Rank 0's object, on every rank. It must be picklable."""
    values = [value]
    if ranks > 1:
        dist.broadcast_object_list(values, src=0, device=device)
    return values[0]


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, (bytes,): gloo does not take every type."""
    return tensor.view(-1).view(torch.uint8)


def sum_numbers(value: Number, ranks: int, group: dist.ProcessGroup | None, device: torch.device) -> Number:
    """The sum over the ranks: of whole numbers and truth values in int64, of others in float64 or complex128.

    Of a number a number (a NumPy number is one), of a tensor one of its shape. RequestError if the ranks' shapes
    differ, and in a backward pass that comes to the result. Waits for the device.
    """
    if isinstance(value, Tensor):
        return _without_gradient(_sum(value.detach(), ranks, group, device), value, "rt.sum")
    if isinstance(value, Integral):
        one = torch.tensor(int(value), dtype=torch.int64)
    elif isinstance(value, Real):
        one = torch.tensor(float(value), dtype=torch.float64)
    else:
        raise RequestError(f"a {type(value).__name__} cannot be summed", "rt.sum(number), or rt.sum(tensor)")
    return _sum(one, ranks, group, device).item()


def _sum(mine: Tensor, ranks: int, group: dist.ProcessGroup | None, device: torch.device) -> Tensor:
    """Sum in the widest type of all ranks': a rank that had no sample gives the 0 that its loop began with."""
    wide = 2 if mine.is_complex() else 1 if mine.is_floating_point() else 0
    if ranks > 1:
        shape = zlib.crc32(repr(tuple(mine.shape)).encode()) if mine.numel() != 1 else 0
        most = torch.tensor([wide, shape, -shape], device=device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        wide, largest, smallest = int(most[0]), int(most[1]), -int(most[2])
        if largest != smallest:
            raise RequestError(
                f"rt.sum got another shape on each rank: {tuple(mine.shape)} on this one",
                "sum tensors of one shape, as of torch.bincount(x, minlength=classes); for rows of any number:"
                " rt.gather(rows)",
            )
    total = mine.to(device, _WIDE[wide], copy=True)
    if ranks > 1:
        dist.all_reduce(torch.view_as_real(total) if total.is_complex() else total, group=group)
    return total


def gather_rows(rows: Tensor, ranks: int, group: dist.ProcessGroup | None, device: torch.device) -> Tensor:
    """The rows of all ranks, one below the other by rank: (n_0 + n_1 + …, …) from (n_r, …) on each.

    RequestError if the ranks' tensors differ in more than their number of rows, and in a backward pass that comes to
    the result.
    """
    if not isinstance(rows, Tensor) or rows.dim() == 0:
        raise RequestError(
            f"a {type(rows).__name__} has no rows to gather", "rt.gather(torch.atleast_1d(torch.as_tensor(rows)))"
        )
    mine = rows.detach().to(device)
    kinds = ask_all((mine.shape[0], mine.shape[1:], mine.dtype), ranks, group)
    if any(kind[1:] != kinds[0][1:] for kind in kinds):
        shapes = ", ".join(f"{(kind[0], *kind[1])} {kind[2]}" for kind in dict.fromkeys(kinds))
        raise RequestError(f"the ranks have rows of different kinds: {shapes}", "gather rows of one shape and type")
    if ranks == 1:
        return _without_gradient(mine, rows, "rt.gather")
    padded = mine.new_zeros((max(kind[0] for kind in kinds), *mine.shape[1:]))
    padded[: mine.shape[0]] = mine
    parts = [torch.empty_like(padded) for _ in kinds]
    dist.all_gather([as_bytes(part) for part in parts], as_bytes(padded), group=group)
    whole = torch.cat([part[: kind[0]] for part, kind in zip(parts, kinds, strict=True)])
    return _without_gradient(whole, rows, "rt.gather")


def _without_gradient(result: Tensor, mine: Tensor, call: str) -> Tensor:
    """Refuse, in a backward pass, the gradient that the result of a call cannot hand on to what this rank gave."""
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
