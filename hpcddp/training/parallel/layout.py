"""Which ranks see different samples, and which hold one copy of the model together.

This is the only place that turns a rank into a data rank. Samples, weights, sums, buffers and random numbers take their
place from it. Ranks with the same data rank get the same samples, draw the same random numbers, and are counted once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcddp.errors import RequestError
from hpcddp.training.collectives import as_bytes, ask_all


@dataclass(frozen=True, slots=True)
class Layout:
    """This rank's place. With 4 ranks and a model size of 2, ranks 0 and 1 have data rank 0."""

    rank: int
    world_size: int
    model_size: int = 1  # ranks that compute one model together (tensor parallel), and see the same samples
    # the ranks that differ from this one in their data rank only; None: all ranks, torch's default group
    data_group: dist.ProcessGroup | None = field(default=None, compare=False)

    @property
    def data_size(self) -> int:
        """How many different parts of a global batch there are."""
        return self.world_size // self.model_size

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


def open_layout(rank: int, world_size: int, model_size: int) -> Layout:
    """This rank's layout, with the process group of its data ranks where that is not all ranks. A collective."""
    if model_size == 1:
        return Layout(rank, world_size)
    # every rank has to make all of them
    groups: list[Any] = [dist.new_group([*range(first, world_size, model_size)]) for first in range(model_size)]
    return Layout(rank, world_size, model_size, groups[rank % model_size])


@torch.no_grad()
def spread_weights(model: nn.Module, device: torch.device, layout: Layout) -> None:
    """The weights and buffers of rank 0 on every rank, as DDP does it for what is trained. A collective.

    A model on torch's device "meta" has none; a DTensor is divided already.
    """
    if layout.world_size == 1:
        return
    forms = ask_all([(name, str(one.dtype), [*one.shape]) for name, one in _list_numbers(model)], layout.world_size)
    for rank, form in enumerate(forms):
        if form != forms[0]:
            raise RequestError(
                f"rank {rank} has another {type(model).__name__} than rank 0: parameters or buffers of other names or"
                " shapes",
                "build the same model on every rank",
            )
    for _, tensor in _list_numbers(model):
        if tensor.is_meta or type(tensor.detach()) is not Tensor or not tensor.numel():
            continue
        there = tensor.detach().to(device).contiguous()
        dist.broadcast(as_bytes(there), src=0)
        tensor.copy_(there)


def _list_numbers(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]
