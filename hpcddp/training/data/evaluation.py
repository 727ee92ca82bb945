"""Evaluation data: each sample once, on one data rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from hpcddp.batchplan import split_evenly
from hpcddp.errors import RequestError
from hpcddp.training.data.loader import move
from hpcddp.training.data.reading import Reading, check_length
from hpcddp.training.parallel.layout import Layout
from hpcddp.units import format_count


class EvaluationLoader:
    """One data rank's contiguous share of a data set, in batches on the device: what the data set gives, in its order.

    Shares differ by at most one sample. Every rank gets the same number of batches, none larger than `batch_size`, so
    that a forward pass may be a collective. Where the numbers do not allow that (a rank would need an empty batch),
    some ranks have one batch less; RequestError then if a forward pass is a collective.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        layout: Layout,
        device: torch.device,
        reading: Reading,
        *,
        forward_is_collective: Callable[[], bool] = lambda: False,
        starts: Callable[[], None] = lambda: None,
        gives: Callable[[], None] = lambda: None,
        begins: Callable[[], None] = lambda: None,
        goes_on: Callable[[], None] = lambda: None,
    ) -> None:
        """`starts` is called when a loop begins, `gives` for each batch. Where all ranks have the same number of
        batches, `begins` is called too, and `goes_on` when the loop is done with its first batch."""
        if batch_size < 1:
            raise RequestError(f"batch_size {batch_size} is not a count of 1 or more", "batch_size=256")
        self.dataset = dataset
        self.batch_size = batch_size  # of one rank, at most
        self.samples = len(dataset)  # type: ignore[arg-type]  # torch's Dataset declares no __len__; map-style ones have it
        shares = split_evenly(self.samples, layout.data_size)
        share, first = shares[layout.data_rank], sum(shares[: layout.data_rank])
        count = -(-shares[0] // batch_size)
        self._uneven = shares[-1] < count
        batches, at = [], first
        for size in split_evenly(share, min(count, share)) if share else ():
            batches.append(list(range(at, at + size)))
            at += size
        self._device = device
        self._starts = starts
        self._gives = gives
        self._begins, self._goes_on = begins, goes_on
        self._forward_is_collective = forward_is_collective
        self._batches = len(batches)
        self._loader: DataLoader[Any] = DataLoader(
            dataset, batch_sampler=batches, generator=torch.Generator(), **reading.options(device)
        )

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[Any]:
        check_length(self.dataset, self.samples)
        if self._uneven and self._forward_is_collective():
            raise RequestError(
                f"{format_count(self.samples, 'sample')} in batches of {self.batch_size} leave some ranks one batch"
                " less, and a sharded model needs all ranks in each forward pass",
                f"batch_size={self.batch_size + 1}, or more samples than ranks",
            )
        if not self._uneven:
            self._begins()
        self._starts()
        for nth, loaded in enumerate(self._loader):
            self._gives()
            yield move(loaded, self._device)
            if nth == 0 and not self._uneven:
                self._goes_on()
