"""Leaving a process group: the ranks part in an order in which nobody loses a connection that somebody still needs.

With torch 2.13, gloo aborted at exit in 1 of 12 to 40 runs ("terminate called without an active exception") while a
DDP object still held the group, and ranks failed if the one that hosts the store left before them. (torch 2.15 did
neither in 181 runs of two ranks without this order, nor in 254 with it.)
"""

from __future__ import annotations

import gc
import json

import torch.distributed as dist
from torch.distributed import DistNetworkError, DistStoreError
from torch.nn.parallel import DistributedDataParallel

from hpcddp.training.bringup.failure import Failure
from hpcddp.training.bringup.group import Group
from hpcddp.training.bringup.roll_call import wait_until

_BYE_TIMEOUT_S = 60.0
_FAILED_BYE_TIMEOUT_S = 3.0  # some may never come


def leave(group: Group) -> None:
    """The normal end: all have arrived, wrappers let go of the group, the store's host leaves last."""
    _release_wrappers()
    if group.world_size > 1:
        dist.barrier()
        _say_bye(group, _BYE_TIMEOUT_S)
    dist.destroy_process_group()


def claim_failure(group: Group, error: BaseException) -> Failure:
    """Tell the store of this rank's failure; returns the run's first one, which may be another rank's."""
    mine = Failure(group.rank, group.host, f"{type(error).__name__}: {error}")
    try:
        group.store.compare_set("failure", "", json.dumps(mine))
        return Failure(*json.loads(group.store.get("failure")))
    except (DistNetworkError, DistStoreError):
        return Failure(0, group.members[0].host, "it ended without a word") if group.rank else mine


def leave_after_failure(group: Group) -> None:
    """An exception ended the body: no collective, which others may never reach."""
    _release_wrappers()
    # closing the connections is what wakes the ranks that wait for this one in a collective
    if group.backend == "nccl" and hasattr(dist.distributed_c10d, "_abort_process_group"):
        dist.distributed_c10d._abort_process_group()  # destroy would wait for kernels that can never end
    else:
        dist.destroy_process_group()
    if group.world_size > 1:
        _say_bye(group, _FAILED_BYE_TIMEOUT_S)


def _say_bye(group: Group, timeout_s: float) -> None:
    try:
        group.store.add("bye", 1)
        if group.is_first:
            wait_until(lambda: group.store.add("bye", 0) >= group.world_size, timeout_s)
    except (DistNetworkError, DistStoreError):
        pass  # the host is gone already; nobody is left to wait for


def _release_wrappers() -> None:
    """Every DDP object lets go of the group, also one that a variable still holds; its `module` stays usable."""
    for thing in gc.get_objects():
        if DistributedDataParallel in type.mro(type(thing)):  # isinstance takes 0.3 s for all, as the class is abstract
            for name in ("reducer", "logger", "process_group"):
                thing.__dict__.pop(name, None)
