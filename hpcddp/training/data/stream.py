"""Data that comes as a stream (torch's IterableDataset): which part of each global batch this rank takes.

Global batch k of an epoch is the next G samples of the stream, on any number of ranks. Every rank goes through the
whole stream, reads its own share of each global batch and skips the others: with the iterator's `skip(count)` if there
is one, else by reading them. So each rank finds the end of the stream by itself. What the data set must do, and may
have, says docs/batch.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from hpcddp.batchplan import BatchPlan
from hpcddp.training.data.randomness import fork_generators, seed_generators
from hpcddp.training.data.reading import Reading
from hpcddp.training.data.sampler import EpochPosition, MicroBatch, no_data_left

StepParts = list[tuple[MicroBatch, Any]]


class Stream:
    """One pass over a data set. The random numbers at a sample depend on (seed, epoch, the sample's number) only.
    Reading seeds the global generators: whoever reads keeps them."""

    def __init__(self, dataset: IterableDataset[Any], seed: int, epoch: int) -> None:
        self._key = ("sample", seed, epoch)
        self._number = 0
        if callable(set_epoch := getattr(dataset, "set_epoch", None)):
            set_epoch(epoch)
        with fork_generators():
            seed_generators("stream", seed, epoch)
            self._source = iter(dataset)
        self._skip: Callable[[int], int] | None = getattr(self._source, "skip", None)
        self._ahead: list[Any] = []  # the next sample, where `is_over` has read it

    def read(self, samples: int) -> list[Any]:
        """The next samples; fewer at the end."""
        ahead, self._ahead = self._ahead[:samples], self._ahead[samples:]
        return [*ahead, *islice(self._read(), samples - len(ahead))]

    def skip(self, samples: int) -> int:
        """Skip the next samples; returns how many there were."""
        ahead, self._ahead = len(self._ahead[:samples]), self._ahead[samples:]
        if self._skip is None:
            return ahead + sum(1 for _ in islice(self._read(), samples - ahead))
        skipped = self._skip(samples - ahead) if samples > ahead else 0
        self._number += skipped
        return ahead + skipped

    def is_over(self) -> bool:
        """Whether there is no other sample."""
        self._ahead = self._ahead or self.read(1)
        return not self._ahead

    def _read(self) -> Iterator[Any]:
        while True:
            seed_generators(*self._key, self._number)
            try:
                sample = next(self._source)
            except StopIteration:
                return
            self._number += 1
            yield sample


class StreamSampler(EpochPosition):
    """The position of the training in a stream, as `GlobalBatchSampler` for data with an index.

    `length` is the number of samples of an epoch if the data set has a `__len__`, else None. Without it an epoch ends
    where the stream does.
    """

    def __init__(self, dataset: IterableDataset[Any], plan: BatchPlan, data_rank: int, *, seed: int = 0) -> None:
        self.length = len(dataset) if hasattr(dataset, "__len__") else None
        self.plan = plan
        self.data_rank = data_rank
        self.seed = seed
        self.dataset = dataset

    def open(self) -> Stream:
        """Open this epoch's stream at the position."""
        stream = Stream(self.dataset, self.seed, self.epoch)
        stream.skip(self.position)
        return stream


class RankSteps(IterableDataset[StepParts]):
    """This data rank's micro batches of the rest of an epoch, step by step. Loader processes take turns.

    The last global batch may be smaller. Each rank then has what there is of its usual share, in the usual number of
    micro batches, because the number of samples left is known only at the end.
    """

    def __init__(self, sampler: StreamSampler, collate: Callable[[list[Any]], Any] | None) -> None:
        self._start = copy(sampler)  # the training moves the sampler while this is read
        self._collate = collate or default_collate
        self._stand_in: Any = None  # the sample of micro batches that do not count and keep the ranks in step

    def __iter__(self) -> Iterator[StepParts]:
        worker = get_worker_info()
        nth, workers = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        whole = self._start.plan.global_batch
        with fork_generators():
            stream = self._start.open()
        for step in count():
            parts: StepParts = []
            with fork_generators():
                if step % workers == nth:
                    total, parts = self._read_step(stream, self._start.position + step * whole)
                else:
                    total = stream.skip(whole)
            if parts:
                yield [(micro, self._collate(samples)) for micro, samples in parts]
            if total < whole:
                return

    def _read_step(self, stream: Stream, position: int) -> tuple[int, StepParts]:
        """(samples of the global batch at this position, this rank's micro batches of it with their samples)."""
        plan, at = self._start.plan, 0
        pieces = list(plan.pieces(self._start.data_rank))
        parts = []
        for piece in pieces:
            at += stream.skip(piece.start - at)
            parts.append(stream.read(piece.samples))
            at += len(parts[-1])
        total = at + stream.skip(plan.global_batch - at)
        if not total:
            return 0, []
        self._stand_in = next((part[0] for part in parts if part), self._stand_in)
        if self._stand_in is None and not all(parts):
            [self._stand_in] = self._start.open().read(1)
        ends = total < plan.global_batch or stream.is_over()
        micros = (
            MicroBatch(position + piece.start, len(part), total, nth, nth == len(pieces) - 1, piece.slice, ends)
            for nth, (piece, part) in enumerate(zip(pieces, parts, strict=True))
        )
        return total, [(micro, part or [self._stand_in]) for micro, part in zip(micros, parts, strict=True)]


def read_stream(
    sampler: StreamSampler, device: torch.device, reading: Reading
) -> Callable[[], Iterator[tuple[MicroBatch, Any]]]:
    """A function that reads the rest of the sampler's epoch."""

    def read() -> Iterator[tuple[MicroBatch, Any]]:
        epoch, position = sampler.epoch, sampler.position
        # no persistent workers: they would keep the epoch that they were started with
        loader: DataLoader[Any] = DataLoader(
            RankSteps(sampler, reading.collate_fn),
            batch_size=None,
            generator=torch.Generator(),  # an iterator draws a seed: not from the generator of the user's loop
            **reading.options(device) | {"collate_fn": _return_unchanged},
        )
        is_empty = True
        for step in loader:
            is_empty = False
            yield from step
        if is_empty:
            raise no_data_left("stream", epoch, position)

    return read


def _return_unchanged(step: Any) -> Any:
    return step
