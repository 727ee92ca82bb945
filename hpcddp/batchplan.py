"""Per-rank batches from the global batch, exactly.

The global batch is the number of samples one optimizer step sees. It is the only number a user gives: each rank's
share, the number of accumulation steps and the size of each micro batch follow from it, for any world size.
Shares differ by at most one sample and sum to the global batch. Every rank takes the same number of accumulation
steps, since the ranks' collectives must match.
"""

from __future__ import annotations

from typing import NamedTuple

from hpcddp.errors import RequestError


def split_evenly(total: int, parts: int) -> tuple[int, ...]:
    """`total` as `parts` whole numbers that sum to it and differ by at most one, the larger ones first."""
    small, larger = divmod(total, parts)
    return tuple(small + 1 if i < larger else small for i in range(parts))


class BatchPlan(NamedTuple):
    """How one optimizer step's samples are dealt to the ranks. Counts are samples unless the name says otherwise."""

    global_batch: int
    world_size: int
    accumulation_steps: int

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of each rank per optimizer step, by rank; they sum to `global_batch`."""
        return split_evenly(self.global_batch, self.world_size)

    def share(self, rank: int) -> int:
        """Samples of this rank per optimizer step."""
        small, larger = divmod(self.global_batch, self.world_size)
        return small + 1 if rank < larger else small

    def micro_batches(self, rank: int) -> tuple[int, ...]:
        """Samples of each of this rank's forward passes; `accumulation_steps` of them, the larger ones first."""
        return split_evenly(self.share(rank), self.accumulation_steps)

    @property
    def largest_micro_batch(self) -> int:
        """The largest forward pass of any rank: what has to fit into a device's memory."""
        return -(-self.share(0) // self.accumulation_steps)

    @property
    def utilisation(self) -> float:
        """Share of the device time that does work, if a step takes as long as its largest micro batches: 1.0 is all."""
        return self.global_batch / (self.world_size * self.accumulation_steps * self.largest_micro_batch)

    def __str__(self) -> str:
        smallest, largest = self.shares[-1], self.shares[0]
        if smallest == largest and largest % self.accumulation_steps == 0:
            micro = largest // self.accumulation_steps
            return f"{self.global_batch} = {self.world_size} ranks x {micro} x {self.accumulation_steps}"
        return (
            f"{self.global_batch} = {self.world_size} ranks x {smallest} to {largest} samples"
            f" in {self.accumulation_steps} micro batches, {self.utilisation:.0%} of the devices' time used"
        )


def plan_batch(global_batch: int, world_size: int, max_micro_batch: int | None = None) -> BatchPlan:
    """Deal `global_batch` samples per optimizer step to `world_size` ranks.

    `max_micro_batch` is the largest number of samples that fit through one forward and backward pass of one rank; None
    means that a rank's whole share fits. Raises RequestError for counts below one, and for more ranks than samples: a
    rank without samples would only keep others waiting.
    """
    for name, value in (
        ("global batch", global_batch),
        ("world size", world_size),
        ("max micro batch", max_micro_batch),
    ):
        if value is not None and value < 1:
            raise RequestError(f"{name} {value} is not a count of 1 or more", f"give a {name} of at least 1")
    if global_batch < world_size:
        raise RequestError(
            f"a global batch of {global_batch} cannot be split over {world_size} ranks: some would have no sample",
            f"use at most {global_batch} ranks, or --global-batch {world_size} or more",
        )
    largest_share = -(-global_batch // world_size)
    steps = 1 if max_micro_batch is None else -(-largest_share // max_micro_batch)
    smallest_share = global_batch // world_size
    if steps > smallest_share:
        raise RequestError(
            f"a global batch of {global_batch} over {world_size} ranks in micro batches of at most {max_micro_batch}"
            f" needs {steps} passes per step, and a rank with {smallest_share} samples cannot fill them",
            f"use --global-batch {-(-global_batch // world_size) * world_size}, or allow larger micro batches",
        )
    return BatchPlan(global_batch, world_size, steps)
