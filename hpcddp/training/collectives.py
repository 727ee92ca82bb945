"""Numbers, tensors and objects of all data ranks together, outside of the training step. Call them on every rank."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hpcddp.errors import RequestError
from hpcddp.training.parallel.layout import Layout

Number = TypeVar("Number", int, float, Tensor)
Thing = TypeVar("Thing")


def sum_over_data_ranks(value: Number, layout: Layout, device: torch.device) -> Number:
    """The sum over the data ranks, in float64: of an int an int, of a float a float, of a tensor one of its shape.

    A tensor of whole numbers keeps its type, any other becomes float64. Waits for the device.
    """
    if isinstance(value, Tensor):
        wide = value.dtype if not (value.is_floating_point() or value.dtype == torch.bool) else torch.float64
        total = value.detach().to(device, torch.int64 if value.dtype == torch.bool else wide, copy=True)
        if layout.data_size > 1:
            dist.all_reduce(total, group=layout.data_group)
        return total
    if isinstance(value, int):
        return int(_sum_one(value, torch.int64, layout, device))
    if isinstance(value, float):
        return float(_sum_one(value, torch.float64, layout, device))
    raise RequestError(f"a {type(value).__name__} cannot be summed", "rt.sum(number), or rt.sum(tensor)")


def _sum_one(value: float, dtype: torch.dtype, layout: Layout, device: torch.device) -> float:
    one = torch.tensor(value, dtype=dtype, device=device)
    if layout.data_size > 1:
        dist.all_reduce(one, group=layout.data_group)
    return one.item()


def gather_rows(rows: Tensor, layout: Layout, device: torch.device) -> Tensor:
    """The rows of all data ranks, one below the other by data rank: (n_0 + n_1 + …, …) from (n_r, …) on each.

    RequestError if the ranks' tensors differ in more than their number of rows.
    """
    mine = rows.detach().to(device)
    if mine.dim() == 0:
        raise RequestError("a single number has no rows to gather", "rt.sum(number), or rt.gather(numbers.reshape(1))")
    if layout.data_size == 1:
        return mine
    kinds: list[Any] = [None] * layout.data_size
    dist.all_gather_object(kinds, (mine.shape[0], mine.shape[1:], mine.dtype), group=layout.data_group)
    if any(kind[1:] != kinds[0][1:] for kind in kinds):
        shapes = ", ".join(f"{(kind[0], *kind[1])} {kind[2]}" for kind in dict.fromkeys(kinds))
        raise RequestError(f"the ranks have rows of different kinds: {shapes}", "gather rows of one shape and type")
    most = max(kind[0] for kind in kinds)
    padded = mine.new_zeros((most, *mine.shape[1:]))
    padded[: mine.shape[0]] = mine
    parts = [torch.empty_like(padded) for _ in kinds]
    dist.all_gather(parts, padded, group=layout.data_group)
    return torch.cat([part[: kind[0]] for part, kind in zip(parts, kinds, strict=True)])


def broadcast(thing: Thing, layout: Layout, device: torch.device) -> Thing:
    """Rank 0's object, on every rank. It has to be one that can be pickled."""
    things = [thing]
    if layout.world_size > 1:
        dist.broadcast_object_list(things, src=0, device=device)
    return things[0]
