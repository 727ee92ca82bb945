"""Data that comes as a stream (torch's IterableDataset): which part of each global batch this rank takes.

The rule is one, and knows nothing of the ranks: global batch k of an epoch is the next G samples of the stream. Every
rank goes through the whole stream. It reads its own contiguous part of each global batch and passes over the others'
parts: with the iterator's `skip(count)`, if it has one, else by reading them. So each rank sees for itself where the
stream ends, and nothing has to be agreed on.

What this asks of a data set: it gives every process the same stream in an epoch; it takes no part of it away by rank or
by worker. If it has a `set_epoch(epoch)`, that is called first. An iterator's `skip(count)` passes over up to so many
samples and returns how many there were, fewer only at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, default_collate, get_worker_info

from hpcddp.batchplan import BatchPlan
from hpcddp.training.samples.randomness import kept_generators, seed_generators
from hpcddp.training.samples.sampler import MicroBatch

Step = list[tuple[MicroBatch, Any]]


class Stream:
    """One pass over a data set. What it draws at a sample depends on (seed, epoch, the sample's number) alone."""

    def __init__(self, dataset: IterableDataset[Any], seed: int, epoch: int) -> None:
        self._key = ("sample", seed, epoch)
        self._number = 0
        if callable(set_epoch := getattr(dataset, "set_epoch", None)):
            set_epoch(epoch)
        with kept_generators():
            seed_generators("stream", seed, epoch)
            self._source = iter(dataset)
        self._skip: Callable[[int], int] | None = getattr(self._source, "skip", None)

    @property
    def can_skip(self) -> bool:
        """Passing over samples costs less than reading them."""
        return self._skip is not None

    def read(self, samples: int) -> list[Any]:
        """The next samples; fewer at the end."""
        return list(islice(self._read(), samples))

    def skip(self, samples: int) -> int:
        """Pass over the next samples; returns how many there were."""
        if self._skip is None:
            return sum(1 for _ in islice(self._read(), samples))
        passed = self._skip(samples) if samples else 0
        self._number += passed
        return passed

    def _read(self) -> Iterator[Any]:
        while True:
            with kept_generators():
                seed_generators(*self._key, self._number)
                try:
                    sample = next(self._source)
                except StopIteration:
                    return
            self._number += 1
            yield sample


class Origin(NamedTuple):
    """Where reading begins, and for whom."""

    plan: BatchPlan
    rank: int
    seed: int
    epoch: int
    place: int  # samples of this epoch that are consumed


class RankSteps(IterableDataset[Step]):
    """This rank's micro batches of the rest of an epoch, a whole optimizer step at a time. Loader processes take turns.

    In the last global batch, which is as small as it is, each rank has what there is of its usual part, and as many
    micro batches as always: how many samples are left is known only at the end.
    """

    def __init__(
        self, dataset: IterableDataset[Any], origin: Origin, collate: Callable[[list[Any]], Any] | None
    ) -> None:
        self._dataset = dataset
        self._origin = origin
        self._collate = collate or default_collate
        self._stand_in: Any = None  # a sample for micro batches that count for nothing, since the ranks keep in step

    def __iter__(self) -> Iterator[Step]:
        worker = get_worker_info()
        nth, workers = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        whole = self._origin.plan.global_batch
        stream = self._open(self._origin.place)
        for step in count():
            if step % workers == nth:
                total, micros = self._read_step(stream, self._origin.place + step * whole)
                if total:
                    yield micros
            else:
                total = stream.skip(whole)
            if total < whole:
                return

    def _open(self, place: int) -> Stream:
        stream = Stream(self._dataset, self._origin.seed, self._origin.epoch)
        stream.skip(place)
        return stream

    def _read_step(self, stream: Stream, place: int) -> tuple[int, Step]:
        """(samples of the global batch at this place, this rank's micro batches of it)."""
        plan, at = self._origin.plan, 0
        pieces = list(plan.pieces(self._origin.rank))
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
            [self._stand_in] = self._open(place).read(1)
        last = len(pieces) - 1
        return total, [
            (
                MicroBatch(place + piece.start, len(part), total, nth, nth == last, piece.slice),
                self._collate(part or [self._stand_in]),
            )
            for nth, (piece, part) in enumerate(zip(pieces, parts, strict=True))
        ]
