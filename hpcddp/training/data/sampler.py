"""Which samples this rank sees, with two integers of state: the epoch, and how many of its samples are consumed.

Global batch k of an epoch holds positions [k*G, (k+1)*G) of the epoch's order. Each data rank takes a contiguous,
balanced share of those. The order does not depend on the number of ranks: a run can stop at any step and resume on any
other number, and each sample is still seen exactly once per epoch. The last global batch of an epoch may be smaller; no
sample is repeated.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hpcddp.batchplan import BatchPlan
from hpcddp.errors import RequestError
from hpcddp.units import format_count

# A shuffled order that is computed, not stored: position -> sample, for any number of samples.


_ROUNDS = 8
_BITS_31 = 0x7FFFFFFF
_BITS_32 = 0xFFFFFFFF


def derive_key(*parts: int | str) -> int:
    """63 bits that depend on every part and on their order; the same on every machine and Python."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _hash(values: Tensor, key: int) -> Tensor:
    """31 well-mixed bits of each value. Every product stays below 2^63, where int64 arithmetic is exact."""
    h = (values & _BITS_31) ^ key
    for factor, shift in ((0x9E3779B1, 15), (0x85EBCA6B, 13), (0xC2B2AE35, 16)):
        h = (h * factor) & _BITS_32
        h = (h ^ (h >> shift)) & _BITS_31
    return h


def permute(positions: Tensor, length: int, seed: int, epoch: int) -> Tensor:
    """The samples (int64, same shape) at these positions (int64, each in [0, length)) of the epoch's order.

    The order depends on (seed, epoch, length) alone: not on the world size, and not on which positions are asked for
    together.
    """
    if length < 2:
        return positions.clone()
    a = math.isqrt(length - 1) + 1
    b = -(-length // a)
    keys = [derive_key("order", seed, epoch, i) & _BITS_31 for i in range(_ROUNDS)]

    def shuffle_once(values: Tensor) -> Tensor:
        left = torch.div(values, b, rounding_mode="floor")
        right = values - left * b
        for i, key in enumerate(keys):
            if i % 2 == 0:
                left = (left + _hash(right, key)) % a
            else:
                right = (right + _hash(left, key)) % b
        return left * b + right

    samples = shuffle_once(positions)
    while bool((outside := samples >= length).any()):
        samples[outside] = shuffle_once(samples[outside])
    return samples


_PLACES_AT_ONCE = 8192


class MicroBatch(NamedTuple):
    """One forward and backward pass of one data rank: over the samples from `position` on, in the order of the epoch.

    `samples` is 0 where the rank's share has fewer samples than there are passes: in an epoch's last, smaller global
    batch, and in every one if micro batches of a single sample meet uneven shares. The rank still runs the pass, on one
    placeholder sample at weight 0, because the other ranks wait for its collectives.
    """

    position: int
    samples: int
    total: int  # samples of the whole global batch, over all data ranks and micro batches
    nth: int  # among this rank's micro batches of this step, from 0
    last: bool
    slice: int | None = None  # of the plan's fixed slices
    ends_epoch: bool = False  # whether its global batch is the last one of the epoch

    @property
    def size(self) -> int:
        """Samples to load."""
        return max(self.samples, 1)


def split_epoch(length: int, plan: BatchPlan, data_rank: int, start: int = 0) -> Iterator[MicroBatch]:
    """Split an epoch of `length` samples, from position `start` on, into this data rank's micro batches.

    Each step's counts sum to its global batch over all data ranks. Every rank has at least one micro batch in each
    step, and all have the same number, unless the plan has fixed slices.
    """
    whole = _list_parts(plan, data_rank, plan.global_batch)
    for position in range(start, length, plan.global_batch):
        total = min(plan.global_batch, length - position)
        for part in whole if total == plan.global_batch else _list_parts(plan, data_rank, total):
            # a rank without samples loads one that exists
            at = min(position + part.position, length - 1)
            yield part._replace(position=at, ends_epoch=position + total == length)


def _list_parts(plan: BatchPlan, data_rank: int, total: int) -> list[MicroBatch]:
    """List this data rank's micro batches of a global batch of `total` samples, with positions in it."""
    last = plan.passes(data_rank, total) - 1
    pieces = enumerate(plan.pieces(data_rank, total))
    return [MicroBatch(piece.start, piece.samples, total, nth, nth == last, piece.slice) for nth, piece in pieces]


class EpochPosition:
    """Position of a training in its data: after `position` samples of an `epoch`, from 0."""

    epoch = 0
    position = 0
    length: int | None  # of an epoch; None: not known
    plan: BatchPlan

    def advance(self, micro: MicroBatch) -> None:
        """The optimizer step of this micro batch's global batch was made."""
        self.position += micro.total
        if micro.ends_epoch:
            self.end_epoch(self.epoch)

    def end_epoch(self, epoch: int) -> None:
        """The loop over this epoch's batches is over, at its end or before: the rest of it counts as consumed."""
        if self.epoch == epoch:
            self.epoch, self.position = epoch + 1, 0

    def set_epoch(self, epoch: int) -> None:
        """Nothing: the order follows the epoch by itself. For scripts that know it of torch's DistributedSampler.

        RequestError for another epoch than that of the next sample. After the last sample of an epoch that one may
        still be meant.
        """
        if epoch != self.epoch and (self.position or epoch != self.epoch - 1):
            raise RequestError(
                f"loader.sampler.set_epoch({epoch}) came in epoch {self.epoch}, and the samples follow the run's own"
                " epochs",
                "leave the call out, or for epoch in rt.epochs(10): loader.sampler.set_epoch(epoch)",
            )


# Where a training is in its data: as a checkpoint holds it, and back.


def describe_position(step: int, sampler: EpochPosition, places: Sequence[tuple[int, int]] = ()) -> dict[str, int]:
    """The position after `step` optimizer steps: the epoch, and how many of its samples are consumed. `places`: pass
    and position of the second loader and further ones."""
    found = {"step": step, "epoch": sampler.epoch, "position": sampler.position}
    for number, (epoch, position) in enumerate(places, 2):
        found |= {f"pass_{number}": epoch, f"position_{number}": position}
    return found


def find_pass(position: dict[str, int], number: int, length: int | None, *, again: bool) -> tuple[int, int]:
    """Find where the loop over this loader, the second or a further one, continues: pass and position. `again`: at the
    start of its pass."""
    epoch, taken = position.get(f"pass_{number}", 0), position.get(f"position_{number}", 0)
    if again:
        return epoch, 0
    return (epoch + 1, 0) if length is not None and taken >= length else (epoch, taken)


def move_to(position: dict[str, int], sampler: EpochPosition, *, again: bool) -> None:
    """Continue at this position. `again`: at the start of its epoch, which has other samples now, or another order.

    RequestError if no batch of the epoch is left: with drop_last it has only `length` of the data set's samples, by the
    global batch.
    """
    taken = 0 if again else position["position"]
    if sampler.length is not None and taken >= sampler.length:
        raise RequestError(
            f"with drop_last=True and a global batch of {sampler.plan.global_batch} no batch is left of epoch"
            f" {position['epoch'] + 1}, of which the run has taken {format_count(taken, 'sample')}",
            "DataLoader(…, drop_last=False), or the global batch that the run had",
        )
    sampler.epoch, sampler.position = position["epoch"], taken


class GlobalBatchSampler(EpochPosition):
    """The samples of one data rank. Its state is `epoch` and `position`; only `advance` and `end_epoch` change it.

    A DataLoader may read ahead as far as it likes: reading is not consuming. With `drop_last` an epoch has whole global
    batches only, so that `length`, its number of samples, is smaller than the data set.
    """

    def __init__(
        self,
        samples: int,
        plan: BatchPlan,
        data_rank: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        if samples < 1:
            raise RequestError("the data set is empty", "check the path that the data set was made from")
        self.samples = samples
        self.length: int = samples - samples % plan.global_batch if drop_last else samples
        if self.length == 0:
            raise RequestError(
                f"the data set has {format_count(samples, 'sample')}, less than one global batch of"
                f" {plan.global_batch}, and drop_last leaves none of them",
                "drop_last=False, or a smaller global batch",
            )
        self.plan = plan
        self.data_rank = data_rank
        self.seed = seed
        self.shuffle = shuffle

    def micro_batches(self) -> Iterator[MicroBatch]:
        """The rest of the current epoch, as counts and positions."""
        return split_epoch(self.length, self.plan, self.data_rank, self.position)

    def draws(self) -> Iterator[tuple[MicroBatch, list[int]]]:
        """The rest of the current epoch: each micro batch with its samples."""
        epoch = self.epoch
        waiting: list[MicroBatch] = []
        size = 0
        for micro in self.micro_batches():
            waiting.append(micro)
            size += micro.size
            if size >= _PLACES_AT_ONCE:
                yield from zip(waiting, self._indices(waiting, epoch), strict=True)
                waiting, size = [], 0
        yield from zip(waiting, self._indices(waiting, epoch), strict=True)

    def _indices(self, micros: list[MicroBatch], epoch: int) -> Iterator[list[int]]:
        """The samples of several micro batches: a tensor operation costs the same for many positions as for few."""
        if not micros:
            return
        positions = torch.cat([torch.arange(m.position, m.position + m.size) for m in micros])
        samples = permute(positions, self.samples, self.seed, epoch) if self.shuffle else positions
        for part in torch.split(samples, [m.size for m in micros]):
            yield part.tolist()
