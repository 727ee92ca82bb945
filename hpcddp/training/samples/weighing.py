"""How much each micro batch counts in the mean over the global batch.

By its samples, or by the parts of them that the caller counts: the tokens that are no padding, the pixels that have a
label. How many parts there are is in the data, so the ranks add up their counts once per step, before its first
backward pass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hpcddp.errors import RequestError
from hpcddp.training.bringup.group import Group
from hpcddp.training.samples.sampler import MicroBatch

Count = Callable[[Any, Any], int]


class Loaded(NamedTuple):
    """A micro batch as it comes from the data set, on the host."""

    micro: MicroBatch
    x: Any
    y: Any


def make_loaded(micro: MicroBatch, loaded: Any) -> Loaded:
    """With what samples collated to as (x, y); y is None where a sample is no pair."""
    return Loaded(micro, *split_pair(loaded))


def split_pair(loaded: Any) -> tuple[Any, Any]:
    """What samples collated to, as (x, y)."""
    return tuple(loaded) if isinstance(loaded, list | tuple) and len(loaded) == 2 else (loaded, None)


class Weight(NamedTuple):
    """What a loss of one micro batch is multiplied by. Tensors where the host would have to wait for the number."""

    counted: int  # samples, or what the caller counts; 0 in a micro batch that only keeps the ranks in step
    mean: float | Tensor  # of a loss that is a mean over the counted ones
    each: float | Tensor  # of a loss that is a sum over them


def weigh(count: int, total: int | Tensor, averaged_over: int) -> Any:
    """W * n / N: the mean loss over n samples, scaled by it and averaged over W ranks by DDP, adds its part of the mean
    over N.

    Exact for any split: uneven shares, accumulation, the last partial global batch. Where gradients are summed and not
    averaged, W is 1.
    """
    return averaged_over * count / total


class Weighing:
    """Gives micro batches their weights. With `count` it reads all micro batches of a step first."""

    def __init__(self, averaged_over: int, group: Group | None = None, count: Count | None = None) -> None:
        self.count = count
        self._averaged_over = averaged_over
        self._group = group  # None: nobody to add counts up with
        self._counted = 0  # on this rank, in the step that the loop is at
        self._warned = False

    def over(self, loaded: Iterator[Loaded]) -> Iterator[tuple[Loaded, Weight]]:
        """Every micro batch with its weight, in the same order. With `count` a collective, once per step."""
        if self.count is None:
            for one in loaded:
                micro = one.micro
                whole, each = (weigh(n, micro.total, self._averaged_over) for n in (micro.samples, 1))
                yield one, Weight(micro.samples, whole, each)
            return
        step: list[Loaded] = []
        for one in loaded:
            step.append(one)
            if one.micro.last:
                counts = [_count_parts(self.count, part) for part in step]
                self._counted = sum(counts)
                total = self._add_up(self._counted)
                for part, n in zip(step, counts, strict=True):
                    yield part, Weight(n, *(weigh(k, total, self._averaged_over) for k in (n, 1)))
                step = []

    def take(self) -> dict[str, float]:
        """What the ranks have to add up for this step's record."""
        return {"counted": float(self._counted)} if self.count is not None else {}

    def learn(self, sums: Mapping[str, float]) -> dict[str, float | None]:
        """The sums over the ranks have arrived; what is to be noted of them."""
        if "counted" not in sums:
            return {}
        if sums["counted"]:
            return {"counted": sums["counted"]}
        if not self._warned and (self._group is None or self._group.is_first):
            print("hpcddp: warning: a global batch had no part that counts; its gradient is zero", file=sys.stderr)
        self._warned = True
        return {"counted": 0.0, "loss": None}  # a mean over nothing

    def _add_up(self, mine: int) -> int | Tensor:
        """Over all ranks, and at least 1: in a global batch without any counted part every weight is then 0.

        On a GPU it stays there: waiting for the number would mean waiting for the step before.
        """
        if self._group is None or self._group.world_size == 1:
            return max(mine, 1)
        total = torch.tensor(mine, dtype=torch.int64, device=self._group.device)
        dist.all_reduce(total)
        # float64: integers are exact up to 2^53
        return total.clamp_(min=1).double() if total.is_cuda else max(int(total), 1)


def _count_parts(count: Count, loaded: Loaded) -> int:
    """What counts in a micro batch: nothing in one that only keeps the ranks in step."""
    if loaded.micro.samples == 0:
        return 0
    parts = int(count(loaded.x, loaded.y))
    if parts < 0:
        raise RequestError(
            f"count= gave {parts} for a micro batch of {loaded.micro.samples} samples",
            "it tells how many parts count, such as: lambda x, y: int((y != -100).sum())",
        )
    return parts
