"""Where each rank will be, before anything is queued: the plan, rank by rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from hpcddp.script.plan import JobPlan


class Place(NamedTuple):
    """One rank's place. Ranks fill a node before the next one, as every rendered launch line asks for.

    `gpu` is the device that the rank takes if it sees all of its node's; None where the job has no GPUs. `gpus` are all
    that it takes, of which that is the first.
    """

    rank: int
    node_rank: int
    local_rank: int
    gpu: int | None
    cpus: int
    gpus: tuple[int, ...] = ()


def list_places(plan: JobPlan) -> Iterator[Place]:
    """Every rank of the job, in order."""
    for rank in range(plan.world_size):
        yield plan_place(plan, rank)


def plan_place(plan: JobPlan, rank: int) -> Place:
    """The place of one rank."""
    node_rank, local_rank = divmod(rank, plan.ranks_per_node)
    order = [int(gpu) for gpu in plan.gpu_order.split(",")] if plan.gpu_order else range(plan.gpus_per_node)
    first = local_rank * plan.gpus_per_rank
    gpus = tuple(order[n % len(order)] for n in range(first, first + plan.gpus_per_rank)) if order else ()
    return Place(rank, node_rank, local_rank, gpus[0] if gpus else None, plan.cpus_per_rank, gpus)
