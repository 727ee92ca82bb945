"""What exact mode sets and checks at its start.

The same numbers come only from the same kernels. An exact run therefore uses deterministic kernels, and the same
hardware and software on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from hpcddp.errors import LaunchError
from hpcddp.training.rendezvous.group import Group
from hpcddp.training.versions import list_conditions, name_differences

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_WORKSPACES = (":4096:8", ":16:8")


@contextmanager
def deterministic_kernels(env: MutableMapping[str, str]) -> Iterator[None]:
    """Inside the body torch uses deterministic kernels, and raises an error where it has none.

    LaunchError if CUBLAS_WORKSPACE_CONFIG allows cuBLAS another order. CPU kernels split their sums by threads, so
    that torch gets one thread.
    """
    if env.setdefault(_WORKSPACE, _WORKSPACES[0]) not in _WORKSPACES:
        raise LaunchError(
            f"{_WORKSPACE}={env[_WORKSPACE]!r} lets cuBLAS add in any order, which exact mode cannot use",
            f"unset {_WORKSPACE}, or export {_WORKSPACE}={_WORKSPACES[0]}",
        )
    threads = torch.get_num_threads()
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    memory: Any = torch.utils.deterministic
    fills = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
    memory.fill_uninitialized_memory = False  # it takes time, and no memory is read here before it is written
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = cudnn
        memory.fill_uninitialized_memory = fills


def check_same_conditions(group: Group) -> None:
    """LaunchError if the ranks have different hardware or software. A collective."""
    if group.world_size == 1:
        return
    conditions: list[Any] = [None] * group.world_size
    dist.all_gather_object(conditions, list_conditions(group.device))
    for rank, theirs in enumerate(conditions):
        if differs := name_differences(conditions[0], theirs):
            host = group.members[rank].host
            raise LaunchError(
                "exact mode needs the same hardware and software on every rank;"
                f" on rank {rank} ({host}) {differs[0]} as on rank 0",
                "ask for nodes of one kind (a constraint in the job file), and use one environment for all ranks",
            )
