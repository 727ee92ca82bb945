"""Data that comes as a stream (torch's IterableDataset): which part of each global batch this rank takes.

Global batch k of an epoch is the next G samples of the stream, on any number of ranks. Every rank goes through the
whole stream. It reads its own contiguous share of each global batch and skips the other shares: with the iterator's
`skip(count)` if there is one, else by reading them. Each rank therefore finds the end of the stream by itself, without
a collective.

The data set must give every process the same stream in an epoch, and must not divide it by rank or by worker. If it has
a `set_epoch(epoch)`, that is called first. An iterator's `skip(count)` skips up to `count` samples and returns how many
it skipped, fewer only at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, default_collate, get_worker_info

from hpcddp.batchplan import BatchPlan
from hpcddp.errors import RequestError
from hpcddp.training.data.randomness import kept_generators, seed_generators
from hpcddp.training.data.sampler import MicroBatch

StepParts = list[tuple[MicroBatch, Any]]


class Stream:
    """One pass over a data set. The random numbers at a sample depend on (seed, epoch, the sample's number) only."""

    def __init__(self, dataset: IterableDataset[Any], seed: int, epoch: int) -> None:
        self._key = ("sample", seed, epoch)
        self._number = 0
        if callable(set_epoch := getattr(dataset, "set_epoch", None)):
            set_epoch(epoch)
        with kept_generators():
            seed_generators("stream", seed, epoch)
            self.source = iter(dataset)
        self._skip: Callable[[int], int] | None = getattr(self.source, "skip", None)

    @property
    def can_skip(self) -> bool:
        """Whether skipping samples costs less than reading them."""
        return self._skip is not None

    def read(self, samples: int) -> list[Any]:
        """The next samples; fewer at the end."""
        return list(islice(self._read(), samples))

    def skip(self, samples: int) -> int:
        """Skip the next samples; returns how many there were."""
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
                    sample = next(self.source)
                except StopIteration:
                    return
            self._number += 1
            yield sample


def check_passes(dataset: IterableDataset[Any]) -> None:
    """RequestError for a stream that can be gone through once only: each pass gets the same iterator, which goes on
    where the one before has ended.

    One of the script's own class may start anew in its `__iter__`; Python's do not.
    """
    first = Stream(dataset, 0, 0).source
    if type(first).__module__ in ("builtins", "itertools") and first is Stream(dataset, 0, 0).source:
        raise RequestError(
            f"the __iter__ of this {type(dataset).__name__} returns the same {type(first).__name__} again, and each"
            " epoch is a pass from the first sample",
            "make a new iterator in __iter__: def __iter__(self): for row in open(self.path): yield parse(row)",
        )


class StreamStart(NamedTuple):
    """Where in a stream reading starts, and for which data rank."""

    plan: BatchPlan
    data_rank: int
    seed: int
    epoch: int
    position: int  # samples of this epoch that are consumed


class RankSteps(IterableDataset[StepParts]):
    """This data rank's micro batches of the rest of an epoch, step by step. Loader processes take turns.

    The last global batch may be smaller. Each rank then has what there is of its usual share, in the usual number of
    micro batches, because the number of samples left is known only at the end.
    """

    def __init__(
        self, dataset: IterableDataset[Any], start: StreamStart, collate: Callable[[list[Any]], Any] | None
    ) -> None:
        self._dataset = dataset
        self._start = start
        self._collate = collate or default_collate
        self._stand_in: Any = None  # the sample of micro batches that do not count and keep the ranks in step

    def __iter__(self) -> Iterator[StepParts]:
        worker = get_worker_info()
        nth, workers = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        whole = self._start.plan.global_batch
        stream = self._open(self._start.position)
        for step in count():
            if step % workers == nth:
                total, micros = self._read_step(stream, self._start.position + step * whole)
                if total:
                    yield micros
            else:
                total = stream.skip(whole)
            if total < whole:
                return

    def _open(self, position: int) -> Stream:
        stream = Stream(self._dataset, self._start.seed, self._start.epoch)
        stream.skip(position)
        return stream

    def _read_step(self, stream: Stream, position: int) -> tuple[int, StepParts]:
        """(samples of the global batch at this position, this rank's micro batches of it)."""
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
            [self._stand_in] = self._open(position).read(1)
        last = len(pieces) - 1
        return total, [
            (
                MicroBatch(position + piece.start, len(part), total, nth, nth == last, piece.slice),
                self._collate(part or [self._stand_in]),
            )
            for nth, (piece, part) in enumerate(zip(pieces, parts, strict=True))
        ]
