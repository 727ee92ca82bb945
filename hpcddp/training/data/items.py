"""Data whose batches the script makes itself: a DataLoader with `batch_sampler=` (buckets) or `batch_size=None`.

One item of such a loader is one rank's micro batch, and `items_per_step` of them, over all ranks, make a step. Step k
of a pass has the items [k*K, (k+1)*K) of its order, on any number of ranks; the last step may have fewer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import islice
from typing import Any

from hpcddp.batchplan import BatchPlan
from hpcddp.errors import RequestError
from hpcddp.training.data.randomness import fork_generators, seed_generators
from hpcddp.training.data.reading import DataSource
from hpcddp.training.data.sampler import EpochPosition, MicroBatch, no_data_left

_COMPARED = 64  # items of a pass: the first alone may be the same by chance


class SingleItem:
    """The collate function of a loader whose data set returns whole batches."""

    def __init__(self, convert: Callable[[Any], Any] | None) -> None:
        self._convert = convert

    def __call__(self, items: Sequence[Any]) -> Any:
        [item] = items
        return item if self._convert is None else self._convert(item)


class ItemSampler(EpochPosition):
    """The position in the batches of a batch sampler, and this rank's share of them.

    `position`, `length` and the plan count items; a `MicroBatch` counts samples. `length` is None where the batch
    sampler has no `__len__`. A rank that has an item less than others runs a pass over a placeholder sample.
    """

    def __init__(
        self, batch_sampler: Iterable[Any], samples: int, plan: BatchPlan, data_rank: int, *, seed: int
    ) -> None:
        self.samples = samples  # of the data set
        self.length = len(batch_sampler) if isinstance(batch_sampler, Sized) else None
        self.plan = plan
        self.data_rank = data_rank
        self.seed = seed
        self._batch_sampler = batch_sampler

    def draws(self) -> Iterator[tuple[MicroBatch, list[int]]]:
        """The rest of the current epoch: each micro batch of this rank with the samples to load."""
        epoch, position, size = self.epoch, self.position, self.plan.global_batch
        items = read_items(self._batch_sampler, self.seed, epoch)
        step = list(islice(items, position, position + size))
        if not step:
            raise no_data_left("batch sampler", epoch, position)
        while step:
            following = list(islice(items, size))
            total = sum(map(len, step))
            pieces = list(self.plan.pieces(self.data_rank, len(step)))
            for nth, piece in enumerate(pieces):
                item = step[piece.start] if piece.samples else step[0][:1]
                counted, last = len(item) * piece.samples, nth == len(pieces) - 1
                at = position + piece.start
                yield MicroBatch(at, counted, total, nth, last, piece.slice, ends_epoch=not following), item
            position, step = position + len(step), following

    def advance(self, micro: MicroBatch) -> None:
        self.position += self.plan.global_batch
        if micro.ends_epoch:
            self.end_epoch(self.epoch)


def read_items(batch_sampler: Iterable[Any], seed: int, epoch: int) -> Iterator[list[int]]:
    """One pass over a batch sampler. What it draws from the global generators depends on (seed, epoch, item) only."""
    for owner in (batch_sampler, getattr(batch_sampler, "sampler", None)):
        if callable(set_epoch := getattr(owner, "set_epoch", None)):
            set_epoch(epoch)
    number, items = 0, iter(())
    while True:
        with fork_generators():
            seed_generators("items", seed, epoch, number)
            items = iter(batch_sampler) if number == 0 else items
            item = next(items, None)
        if item is None:
            return
        number += 1
        yield list(item)


def describe_items(batch_sampler: Iterable[Any], seed: int) -> str:
    """How the first pass begins. RequestError where a second one begins otherwise: a resumed run could not find its
    place again."""
    first, again = (list(islice(read_items(batch_sampler, seed, 0), _COMPARED)) for _ in range(2))
    if first != again:
        raise RequestError(
            f"two passes over this {type(batch_sampler).__name__} for one epoch give different batches: a resumed run"
            " would see some samples twice and others never",
            "shuffle with torch, random or numpy themselves, which the runtime seeds for each pass, without a generator"
            " of its own; or give it a set_epoch(epoch)",
        )
    return f"{first[:2]} … {hashlib.sha256(repr(first).encode()).hexdigest()[:8]}"


def check_items(source: DataSource, items_per_step: int | None, given: Mapping[str, object], *, counts: bool) -> None:
    """RequestError unless it is known how many batches of this loader make a step, and how much each weighs. `given`:
    sizes of the run, which go with other loaders only. `counts`: whether count= was given."""
    if not source.has_items:
        if items_per_step is not None:
            raise RequestError(
                f"items_per_step={items_per_step} was given, and the DataLoader has a batch_size, which is the global"
                " batch",
                "leave out items_per_step; it is for a DataLoader with batch_sampler= or batch_size=None",
            )
        return
    if items_per_step is None:
        raise RequestError(
            "the DataLoader makes its own batches, and nothing says how many of them make an optimizer step",
            "loader = rt.loader(loader, items_per_step=8): so many in each step, over all ranks",
        )
    if source.gives_items and not counts:
        raise RequestError(
            "the DataLoader has batch_size=None, and nothing says how many samples a batch of its data set has",
            f"rt.loader(loader, items_per_step={items_per_step}, count=lambda batch: len(batch[0]))",
        )
    for name, value in given.items():
        if value is not None:
            raise RequestError(
                f"{name}={value} was given, and the DataLoader makes its batches itself",
                f"leave out {name}: items_per_step={items_per_step} says how many of its batches a step has",
            )


def check_second(items_per_step: int | None, *, is_several: bool) -> None:
    """RequestError for a second loader in micro batches, where those of the first are whole."""
    if (items_per_step or 0) > 1 and not is_several:
        raise RequestError(
            "a second loader with items_per_step gives batches in micro batches, and the first one does not",
            "hpcddp.runtime(max_micro_batch=…): for x, y in rt.micro_batches(batch), of both loaders",
        )
