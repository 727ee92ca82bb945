"""Per-rank batches from the global batch, exactly.

The global batch is the number of samples one optimizer step sees. It is the only number a user gives: each rank's
share, the number of accumulation steps and the size of each micro batch follow from it, for any world size.
Shares differ by at most one sample and sum to the global batch. Every rank takes the same number of accumulation
steps, since the ranks' collectives must match: one whose share has fewer samples than there are steps runs the last of
them on a placeholder sample of weight zero.

With fixed slices (exact mode) the global batch is cut first, into a number of slices that does not depend on the world
size, and ranks take whole slices, each a micro batch of its own: then nothing that is computed depends on the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from hpcddp.errors import RequestError
from hpcddp.units import format_count

EXACT_METHODS = ("tree", "integer")


def split_evenly(total: int, parts: int) -> tuple[int, ...]:
    """`total` as `parts` whole numbers that sum to it and differ by at most one, the larger ones first."""
    small, larger = divmod(total, parts)
    return tuple(small + 1 if i < larger else small for i in range(parts))


class Piece(NamedTuple):
    """A micro batch of one rank: `samples` of the global batch from `start` on."""

    start: int
    samples: int
    slice: int | None  # which of the fixed slices it is; None without them


class BatchPlan(NamedTuple):
    """How one optimizer step's samples are dealt to the ranks. Counts are samples unless the name says otherwise."""

    global_batch: int
    data_size: int  # data ranks: ranks that get different samples
    accumulation_steps: int  # micro batches per step of the rank that has most; without slices of every rank
    slices: int | None = None

    def pieces(self, rank: int, total: int | None = None) -> Iterator[Piece]:
        """Micro batches of this rank in a global batch of `total` samples (None: a whole one), in order.

        Over all ranks they are [0, total), each sample once. Without slices every rank gets the same number of them;
        fewer than `accumulation_steps` if `total` is small. A piece has no samples where there are not enough.
        """
        total = self.global_batch if total is None else total
        if self.slices is not None:
            first, count = _part(self.slices, self.data_size, rank)
            for k in range(first, first + count):
                yield Piece(*_part(total, self.slices, k), k)
            return
        start, share = _part(total, self.data_size, rank)
        for samples in split_evenly(share, self.passes(rank, total)):
            yield Piece(start, samples, None)
            start += samples

    def passes(self, rank: int, total: int | None = None) -> int:
        """Micro batches of this rank in a step over `total` samples (None: a whole global batch)."""
        if self.slices is not None:
            return _part(self.slices, self.data_size, rank)[1]
        if total is None or total == self.global_batch:
            return self.accumulation_steps
        largest_share = -(-total // self.data_size)
        return -(-largest_share // self.largest_micro_batch)

    def share(self, rank: int) -> int:
        """Samples of this rank per optimizer step."""
        return sum(piece.samples for piece in self.pieces(rank))

    @property
    def largest_micro_batch(self) -> int:
        """The largest forward pass of any rank: what has to fit into a device's memory."""
        parts = (self.data_size, self.accumulation_steps) if self.slices is None else (self.slices,)
        largest = self.global_batch
        for count in parts:
            largest = -(-largest // count)
        return largest

    @property
    def utilisation(self) -> float:
        """Share of the device time that does work, if a step takes as long as its largest micro batches: 1.0 is all."""
        return self.global_batch / (self.data_size * self.accumulation_steps * self.largest_micro_batch)

    def __str__(self) -> str:
        if self.slices is not None:
            sizes = {_part(self.global_batch, self.slices, k)[1] for k in (0, self.slices - 1)}
            owned = {self.passes(rank) for rank in (0, self.data_size - 1)}
            return (
                f"{self.global_batch} = {format_count(self.slices, 'slice')} x {_span(sizes)} samples,"
                f" {_span(owned)} of them on {'1 rank' if self.data_size == 1 else f'each of {self.data_size} ranks'}"
            )
        ranks, passes = format_count(self.data_size, "rank"), format_count(self.accumulation_steps, "micro batch")
        smallest, largest = self.share(self.data_size - 1), self.share(0)
        if smallest == largest and largest % self.accumulation_steps == 0:
            micro = largest // self.accumulation_steps
            return f"{self.global_batch} = {ranks} x {micro} x {self.accumulation_steps}"
        return (
            f"{self.global_batch} = {ranks} x {_span({smallest, largest})} samples"
            f" in {passes}, {self.utilisation:.0%} of the devices' time used"
        )


def _part(total: int, parts: int, nth: int) -> tuple[int, int]:
    """The start and the size of the nth of `parts` even parts of `total`; as in `split_evenly`."""
    small, larger = divmod(total, parts)
    return nth * small + min(nth, larger), small + (nth < larger)


def _span(values: set[int]) -> str:
    return f"{min(values)} to {max(values)}" if len(values) > 1 else f"{min(values)}"


def plan_batch(
    global_batch: int, data_size: int, max_micro_batch: int | None = None, slices: int | None = None
) -> BatchPlan:
    """Deal `global_batch` samples per optimizer step to `data_size` ranks.

    `max_micro_batch` is the largest number of samples that fit through one forward and backward pass of one rank; None
    means that a rank's whole share fits. `slices` cuts the global batch into that many fixed micro batches first.
    Counts are 1 or more. Raises RequestError for more ranks than samples or slices: a rank without any would only
    keep others waiting. Any other global batch works with any `max_micro_batch`.
    """
    if global_batch < data_size:
        raise RequestError(
            f"a global batch of {global_batch} cannot be split over {format_count(data_size, 'rank')}:"
            " some would have no sample",
            f"use at most {format_count(global_batch, 'rank')}, or --global-batch {data_size} or more",
        )
    if slices is not None:
        return _plan_slices(global_batch, data_size, max_micro_batch, slices)
    largest_share = -(-global_batch // data_size)
    steps = 1 if max_micro_batch is None else -(-largest_share // max_micro_batch)
    return BatchPlan(global_batch, data_size, steps)


def _plan_slices(global_batch: int, data_size: int, max_micro_batch: int | None, slices: int) -> BatchPlan:
    if slices > global_batch:
        what = f"a global batch of {global_batch} cannot be cut into {slices} slices: some would have no sample"
        raise RequestError(what, f"use at most {format_count(global_batch, 'slice')}")
    if slices < data_size:
        raise RequestError(
            f"{format_count(slices, 'slice')} cannot be dealt to {data_size} ranks: some would have none",
            f"use {data_size} slices or more, from the first run on: their number is part of the result",
        )
    plan = BatchPlan(global_batch, data_size, -(-slices // data_size), slices)
    if max_micro_batch is not None and plan.largest_micro_batch > max_micro_batch:
        raise RequestError(
            f"{format_count(slices, 'slice')} of a global batch of {global_batch} hold"
            f" {format_count(plan.largest_micro_batch, 'sample')} each,"
            f" over the largest micro batch of {max_micro_batch}",
            f"use {-(-global_batch // max_micro_batch)} slices or more",
        )
    return plan
