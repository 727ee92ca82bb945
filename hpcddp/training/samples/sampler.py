"""Which samples this rank sees, with one integer of state: the number of samples that training has consumed.

Global batch k of an epoch holds places [k*G, (k+1)*G) of the epoch's order; a rank takes a contiguous, balanced part of
those. The order knows nothing of the world size, so a run can stop at any step and go on with any other number of
ranks, and every sample is still seen exactly once per epoch. The last global batch of an epoch is as small as it is:
nothing is repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.utils.data import Sampler

from hpcddp.batchplan import BatchPlan
from hpcddp.errors import RequestError
from hpcddp.training.samples.permutation import permute

_PLACES_AT_ONCE = 8192


class MicroBatch(NamedTuple):
    """One forward and backward pass of one rank: over the samples from `place` on, in the order of the epoch.

    No samples happens only in an epoch's last global batch, if it has fewer samples than there are ranks. The rank
    still takes part, with one sample at weight 0, since the other ranks wait for its collectives.
    """

    place: int
    samples: int
    total: int  # samples of the whole global batch, over all ranks and micro batches
    nth: int  # among this rank's micro batches of this step, from 0
    last: bool
    slice: int | None = None  # of the plan's fixed slices

    @property
    def size(self) -> int:
        """Samples to load."""
        return max(self.samples, 1)


def split_epoch(length: int, plan: BatchPlan, rank: int, start: int = 0) -> Iterator[MicroBatch]:
    """This rank's micro batches from place `start` of an epoch of `length` samples to its end.

    Each step's counts sum to its global batch over all ranks, and every rank has at least one micro batch in each step:
    the same number on every rank, unless the plan has fixed slices.
    """
    for place in range(start, length, plan.global_batch):
        total = min(plan.global_batch, length - place)
        passes = plan.passes(rank, total)
        for nth, piece in enumerate(plan.pieces(rank, total)):
            # a rank without samples loads one that exists
            first = min(place + piece.start, length - 1)
            yield MicroBatch(first, piece.samples, total, nth, nth == passes - 1, piece.slice)


class GlobalBatchSampler(Sampler[list[int]]):
    """A batch sampler for one rank. `consumed` is its whole state and only moves when `advance` is called after a step.

    Iterating gives the rest of the current epoch, one list of sample indices per micro batch. A DataLoader may read
    ahead as far as it likes: reading is not consuming.
    """

    def __init__(self, length: int, plan: BatchPlan, rank: int, *, seed: int = 0, shuffle: bool = True) -> None:
        if length < 1:
            raise RequestError("the data set is empty", "check the path that the data set was made from")
        self.length = length
        self.plan = plan
        self.rank = rank
        self.seed = seed
        self.shuffle = shuffle
        self.consumed = 0

    @property
    def epoch(self) -> int:
        """The epoch that the next sample belongs to, from 0."""
        return self.consumed // self.length

    @property
    def place(self) -> int:
        """How many samples of this epoch are consumed."""
        return self.consumed % self.length

    @property
    def steps_left(self) -> int:
        """Optimizer steps until the end of this epoch; 0 right after its last one."""
        return -(-(self.length - self.place) // self.plan.global_batch) if self.place else 0

    def advance(self, samples: int) -> None:
        """One optimizer step was made, over this many samples on all ranks together."""
        if samples > self.length - self.place:
            raise RequestError(
                f"a step over {samples} samples does not fit into the {self.length - self.place} left of this epoch",
                "call rt.step() once, after the micro batch whose `last` is true",
            )
        self.consumed += samples

    def end_epoch(self, epoch: int) -> None:
        """The loop over this epoch's batches is over, at its end or before: the rest of it counts as consumed."""
        self.consumed = (epoch + 1) * self.length

    def micro_batches(self) -> Iterator[MicroBatch]:
        """The rest of the current epoch, as counts and places."""
        return split_epoch(self.length, self.plan, self.rank, self.place)

    def __len__(self) -> int:
        """Micro batches left in this epoch."""
        whole, tail = divmod(self.length - self.place, self.plan.global_batch)
        return whole * self.plan.passes(self.rank) + (self.plan.passes(self.rank, tail) if tail else 0)

    def __iter__(self) -> Iterator[list[int]]:
        epoch = self.epoch
        waiting: list[MicroBatch] = []
        size = 0
        for micro in self.micro_batches():
            waiting.append(micro)
            size += micro.size
            if size >= _PLACES_AT_ONCE:
                yield from self._indices(waiting, epoch)
                waiting, size = [], 0
        yield from self._indices(waiting, epoch)

    def _indices(self, micros: list[MicroBatch], epoch: int) -> Iterator[list[int]]:
        """The samples of several micro batches: a tensor operation costs the same for many places as for few."""
        if not micros:
            return
        places = torch.cat([torch.arange(m.place, m.place + m.size) for m in micros])
        samples = permute(places, self.length, self.seed, epoch) if self.shuffle else places
        for part in torch.split(samples, [m.size for m in micros]):
            yield part.tolist()

    def state_dict(self) -> dict[str, int]:
        return {"consumed": self.consumed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.consumed = state["consumed"]
