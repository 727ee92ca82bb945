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
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from hpcddp.batchplan import BatchPlan
from hpcddp.errors import RequestError
from hpcddp.units import format_count

_ROUNDS = 8  # of `permute`
_BITS_31 = 0x7FFFFFFF
_BITS_32 = 0xFFFFFFFF
_AT_ONCE = 64  # micro batches: a tensor operation costs the same for many positions as for few


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
    """The samples (int64, same shape) at these positions (int64, each in [0, length)) of the epoch's order, which is
    computed, not stored. It depends on (seed, epoch, length) alone: not on the world size, and not on which positions
    are asked for together.
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


def count_used(samples: int, global_batch: int, *, drop_last: bool) -> int:
    """Count the samples of an epoch: with `drop_last` those in whole global batches. RequestError if there are none."""
    used = samples - samples % global_batch if drop_last else samples
    if not used:
        raise RequestError(
            f"the data set has {format_count(samples, 'sample')}, and a global batch {global_batch}",
            "check the path that the data set was made from; or drop_last=False, or a smaller global batch",
        )
    return used


def no_data_left(source: str, epoch: int, position: int) -> RequestError:
    """The error for a source that gives nothing from this position on."""
    return RequestError(
        f"the {source} of epoch {epoch} has nothing behind the first {position}, which the run has consumed"
        if position
        else f"the {source} of epoch {epoch} is empty",
        "check what it is made from, and that each __iter__ begins anew",
    )


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


class EpochPosition:
    """Position of a training in its data: after `position` samples of an `epoch`, from 0. Loaders only read it."""

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
        """Do nothing: the order follows the run's epochs. Scripts call it as torch's DistributedSampler asks."""


def describe_position(step: int, sampler: EpochPosition, places: Sequence[tuple[int, int]] = ()) -> dict[str, int]:
    """The position after `step` optimizer steps, as a checkpoint holds it: the epoch, and how many of its samples are
    consumed. `places`: pass and position of the second loader and further ones."""
    found = {"step": step, "epoch": sampler.epoch, "position": sampler.position}
    for number, (epoch, position) in enumerate(places, 2):
        found |= {f"pass_{number}": epoch, f"position_{number}": position}
    return found


def find_start(position: dict[str, int], number: int, length: int | None, *, again: bool) -> tuple[int, int]:
    """Find where the loop over this loader continues: pass and position. `again`: at the start of its pass, which has
    other samples now, or another order."""
    names = ("epoch", "position") if number == 1 else (f"pass_{number}", f"position_{number}")
    epoch, consumed = (position.get(name, 0) for name in names)
    if again:
        return epoch, 0
    return (epoch + 1, 0) if length is not None and consumed >= length else (epoch, consumed)


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
        self.samples = samples
        self.length: int = count_used(samples, plan.global_batch, drop_last=drop_last)
        self.plan = plan
        self.data_rank = data_rank
        self.seed = seed
        self.shuffle = shuffle

    def micro_batches(self) -> Iterator[MicroBatch]:
        """The rest of the current epoch, as counts and positions.

        Each step's counts sum to its global batch over all data ranks. Every rank has at least one micro batch in each
        step, and all have the same number, unless the plan has fixed slices.
        """
        step = self.plan.global_batch
        whole = self._list_parts(step)
        for position in range(self.position, self.length, step):
            total = min(step, self.length - position)
            for part in whole if total == step else self._list_parts(total):
                # a rank without samples loads one that exists
                at = min(position + part.position, self.length - 1)
                yield part._replace(position=at, ends_epoch=position + total == self.length)

    def _list_parts(self, total: int) -> list[MicroBatch]:
        """List this rank's micro batches of a global batch of `total` samples, with positions in it."""
        pieces = list(self.plan.pieces(self.data_rank, total))
        last = len(pieces) - 1
        return [MicroBatch(p.start, p.samples, total, nth, nth == last, p.slice) for nth, p in enumerate(pieces)]

    def draws(self) -> Iterator[tuple[MicroBatch, list[int]]]:
        """The rest of the current epoch: each micro batch with its samples."""
        epoch, micros = self.epoch, self.micro_batches()
        while together := list(islice(micros, _AT_ONCE)):
            sizes = [micro.size for micro in together]
            parted = zip(together, sizes, strict=True)
            samples = torch.cat([torch.arange(micro.position, micro.position + size) for micro, size in parted])
            if self.shuffle:
                samples = permute(samples, self.samples, self.seed, epoch)
            parts = torch.split(samples, sizes)
            for micro, part in zip(together, parts, strict=True):
                yield micro, part.tolist()
