"""Evaluation data: each sample once, on one data rank."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from hpcddp.batchplan import split_evenly
from hpcddp.errors import RequestError
from hpcddp.training.data.loader import move
from hpcddp.training.data.reading import Reading
from hpcddp.training.data.sampler import count_used
from hpcddp.training.parallel.layout import Layout
from hpcddp.units import format_count


class EvaluationLoader:
    """One data rank's contiguous share of a data set, in batches on the device: what the data set gives, in its order.

    `batch_size` is global: a batch of one rank has at most its share of it, batch_size / data ranks rounded up. Shares
    differ by at most one sample. All ranks have the same number of batches where the samples suffice for that; else
    some have one batch less, or none, which is a RequestError if a forward pass is a collective. With `drop_last` the
    last global batch is left out if it is not whole.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        layout: Layout,
        device: torch.device,
        reading: Reading,
        *,
        drop_last: bool = False,
        forward_is_collective: Callable[[], bool] = lambda: False,
        starts: Callable[[bool], None] = lambda _is_even: None,
        gives: Callable[[], None] = lambda: None,
        goes_on: Callable[[], None] = lambda: None,
    ) -> None:
        """`starts` is called when a loop begins, with whether all ranks have the same number of batches; `gives` for
        each batch; `goes_on`, where they have, when the loop is done with its first batch. Rank 0 prints the shares."""
        self.dataset = dataset
        self.batch_size = batch_size
        length = len(dataset)  # type: ignore[arg-type]  # torch's Dataset declares no __len__; map-style ones have it
        self.samples = count_used(length, batch_size, drop_last=drop_last)
        self._ranks = layout.data_size
        shares = split_evenly(self.samples, self._ranks)
        largest = -(-batch_size // self._ranks)
        count = -(-shares[0] // largest)
        self._is_even = shares[-1] >= count
        batches = _cut(sum(shares[: layout.data_rank]), shares[layout.data_rank], largest, count)
        self._device = device
        self._starts, self._gives, self._goes_on = starts, gives, goes_on
        self._forward_is_collective = forward_is_collective
        self._batches = len(batches)
        self._loader: DataLoader[Any] = DataLoader(
            dataset, batch_sampler=batches, generator=torch.Generator(), **reading.options(device)
        )
        if layout.rank == 0 and self._ranks > 1:
            each = " to ".join(map(str, sorted({shares[-1], shares[0]})))
            line = f"{self.samples} = {self._ranks} ranks x {each} samples, in batches of at most"
            print(f"hpcddp: evaluation: {line} {min(largest, shares[0])}", file=sys.stderr, flush=True)

    def __len__(self) -> int:
        """Batches of this rank."""
        return self._batches

    def __iter__(self) -> Iterator[Any]:
        if not self._is_even and self._forward_is_collective():
            raise RequestError(
                f"{format_count(self.samples, 'sample')} in global batches of {self.batch_size} leave some of"
                f" {self._ranks} ranks one batch less, and a sharded model needs all ranks in each forward pass",
                f"batch_size={2 * self._ranks} or more, and at least {self._ranks} samples; or fewer ranks",
            )
        self._starts(self._is_even)
        for nth, content in enumerate(self._loader):
            self._gives()
            yield move(content, self._device)
            if nth == 0 and self._is_even:
                self._goes_on()


def _cut(first: int, share: int, largest: int, count: int) -> list[list[int]]:
    """The samples [first, first + share) in `count` batches of at most `largest`, full ones first, none of them empty:
    fewer than `count` where there are fewer samples. On one rank they are those of a plain DataLoader."""
    batches: list[list[int]] = []
    while share:
        size = max(1, min(largest, share - (count - len(batches) - 1)))
        batches.append(list(range(first, first + size)))
        first, share = first + size, share - size
    return batches
