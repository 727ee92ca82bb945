"""What an allocation, or this machine, has to start ranks on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from hpcddp.errors import LaunchError, RequestError
from hpcddp.ranks.allocation import Allocation
from hpcddp.ranks.device import count_gpus
from hpcddp.schedulers.nodelist import expand_counts
from hpcddp.schedulers.registry import find_scheduler
from hpcddp.units import format_count, parse_count, read_number


class Room(NamedTuple):
    """What there is to run on: nodes, and of each node the slots that the scheduler gave, CPUs and GPUs."""

    nodes: int
    slots: int
    cpus: int
    gpus: int


def find_room(allocation: Allocation | None, env: Mapping[str, str]) -> Room:
    """LaunchError if the job does not say its hosts, or has other numbers of slots on them."""
    gpus = count_gpus(env)
    cpus = len(os.sched_getaffinity(0))
    if allocation is None:
        return Room(1, 1, cpus, gpus)
    if allocation.hosts is None:
        raise LaunchError(
            f"{allocation.scheduler} job {allocation.job_id} does not say on which hosts it runs",
            "run `hpcddp launch` in the job's own shell, where its variables are set",
        )
    counts = {slots for _, slots in allocation.hosts}
    if len(counts) > 1:
        raise LaunchError(
            f"the allocation has {min(counts)} to {max(counts)} slots per host ({allocation.source})",
            "ask for the same number on every node",
        )
    variables = find_scheduler(allocation.scheduler).variables
    each = env.get(variables.cpus_of_nodes, "")
    given = min(expand_counts(each, variables.cpus_of_nodes)) if each else None
    cpus = read_number(env.get(variables.cpus, "")) or given or cpus
    return Room(len(allocation.hosts), counts.pop(), cpus, gpus)


def without_spares(room: Room, asked: str) -> int:
    """The nodes to train on. RequestError if the spare ones leave none."""
    spares = parse_count(asked, "--set spares")
    if spares >= room.nodes:
        hint = f"--set spares={room.nodes - 1}" if room.nodes > 1 else "leave out spares"
        all_nodes = format_count(room.nodes, "node")
        raise RequestError(f"--set spares={spares} of {all_nodes} leaves none to train on", hint)
    return room.nodes - spares
