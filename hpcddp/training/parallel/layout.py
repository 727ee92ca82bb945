"""Which ranks see different samples, and which hold one copy of the model together.

This is the only place that turns a rank into a data rank. Samples, weights, sums, buffers and random numbers take their
place from it. Ranks with the same data rank get the same samples, draw the same random numbers, and are counted once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcddp.errors import RequestError

DATA = "data"


@dataclass(frozen=True, slots=True)
class Layout:
    """This rank's place in a mesh whose first dimension is "data"; the others split the model.

    The last dimension varies fastest, as in torch's DeviceMesh: with data 2 and tensor 2, ranks 0 and 1 have data rank
    0.
    """

    rank: int
    mesh: tuple[tuple[str, int], ...]  # (name, ranks along it) of each dimension
    # the ranks that differ from this one in their data rank only; None: all ranks, torch's default group
    data_group: dist.ProcessGroup | None = field(default=None, compare=False)

    @property
    def world_size(self) -> int:
        return math.prod(size for _, size in self.mesh)

    @property
    def data_size(self) -> int:
        """How many different parts of a global batch there are."""
        return self.mesh[0][1]

    @property
    def model_size(self) -> int:
        """Ranks that hold one copy of the model together, and see the same samples."""
        return self.world_size // self.data_size

    @property
    def data_rank(self) -> int:
        """Which part of a global batch this rank sees."""
        return self.rank // self.model_size

    @property
    def is_counted(self) -> bool:
        """Whether this rank is the first of those with its data rank: sums over all ranks take its numbers only."""
        return self.rank % self.model_size == 0

    @property
    def data_ranks(self) -> tuple[int, ...]:
        """The ranks of `data_group`, by data rank."""
        return tuple(range(self.rank % self.model_size, self.world_size, self.model_size))

    def ranks_of(self, data_rank: int) -> tuple[int, ...]:
        """The ranks that see the samples of this data rank."""
        return tuple(range(data_rank * self.model_size, (data_rank + 1) * self.model_size))


def plan_layout(rank: int, world_size: int, model_mesh: Sequence[tuple[str, int]] = ()) -> Layout:
    """The layout of `world_size` ranks; `model_mesh` has the dimensions that split the model, if any does.

    RequestError for dimensions that do not divide the ranks, or that come twice.
    """
    names = [DATA, *(name for name, _ in model_mesh)]
    if len(set(names)) < len(names):
        raise RequestError(f"the mesh has a dimension twice: {', '.join(names)}", "name each dimension once")
    for name, size in model_mesh:
        if size < 1:
            raise RequestError(f"mesh dimension {name} has size {size}", f"give {name} a size of at least 1")
    model_size = math.prod(size for _, size in model_mesh)
    if world_size % model_size:
        shape = " x ".join(f"{name} {size}" for name, size in model_mesh)
        raise RequestError(
            f"{world_size} ranks cannot be divided into groups of {model_size} ({shape})",
            f"use a multiple of {model_size} ranks",
        )
    return Layout(rank, ((DATA, world_size // model_size), *model_mesh))


def open_layout(rank: int, world_size: int, model_mesh: Sequence[tuple[str, int]] = ()) -> Layout:
    """As `plan_layout`, with the process group of the data ranks where that is not all ranks. A collective."""
    layout = plan_layout(rank, world_size, model_mesh)
    if layout.model_size == 1:
        return layout
    return Layout(layout.rank, layout.mesh, open_data_group(layout))


def open_data_group(layout: Layout, backend: str | None = None) -> dist.ProcessGroup:
    """A new process group of this rank's data ranks; `backend` None takes the default group's. A collective."""
    numbers = range(layout.model_size)
    columns = [[layout.ranks_of(d)[number] for d in range(layout.data_size)] for number in numbers]
    # every rank has to make all of them
    groups: list[Any] = [dist.new_group(column, backend=backend) for column in columns]
    group: dist.ProcessGroup = groups[layout.rank % layout.model_size]
    return group


# The same on every rank.


def ask_all(mine: Any, ranks: int, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What each rank has, by its number in the group of so many ranks. A collective. It can be pickled."""
    everyones = [mine] * ranks
    if ranks > 1:
        dist.all_gather_object(everyones, mine, group=group)
    return everyones


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, (bytes,): gloo does not take every type."""
    return tensor.view(-1).view(torch.uint8)


@torch.no_grad()
def spread_weights(model: nn.Module, device: torch.device, layout: Layout) -> None:
    """The weights and buffers of rank 0 on every rank, as DDP does it for what is trained. A collective.

    A model on torch's device "meta" has none; a DTensor is divided already.
    """
    if layout.world_size == 1:
        return
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_meta or type(tensor.detach()) is not Tensor or not tensor.numel():
            continue
        there = tensor.detach().to(device).contiguous()
        dist.broadcast(as_bytes(there), src=0)
        tensor.copy_(there)
