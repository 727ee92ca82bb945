"""Leave a process group in an order in which no rank closes a connection that another rank still needs.

With torch 2.13, gloo aborted at exit in 1 of 12 to 40 runs ("terminate called without an active exception") while
something still held the group, and ranks failed if the rank that hosts the store left before them. What holds it: a DDP
object, and the functions of torch.distributed.nn as a default, if that was imported after the group was there. The
guard in `guard/` waits for gloo's threads where a program is not one of hpcddp's.
"""

from __future__ import annotations

import json

import torch.distributed as dist
from torch.distributed import DistNetworkError, DistStoreError

from hpcddp.training.rendezvous.failure import STORE_IS_GONE, Failure
from hpcddp.training.rendezvous.group import Group
from hpcddp.training.rendezvous.roll_call import wait_until
from hpcddp.training.torch_compat import abort_process_group, destroy_process_group, release_wrappers

_SIGN_OFF_TIMEOUT_S = 60.0
_FAILED_SIGN_OFF_TIMEOUT_S = 3.0  # some ranks may never come


def leave(group: Group) -> None:
    """The normal end: wait for all ranks, release the wrappers, and let the host of the store leave last."""
    release_wrappers()
    if group.world_size > 1:
        dist.barrier()
        _sign_off(group, _SIGN_OFF_TIMEOUT_S)
    destroy_process_group()


def claim_failure(group: Group, error: BaseException) -> Failure:
    """Put this rank's failure into the store; returns the first failure of the run, which may be another rank's."""
    mine = Failure(group.rank, group.host, f"{type(error).__name__}: {error}")
    try:
        group.store.compare_set("failure", "", json.dumps(mine))
        return Failure(*json.loads(group.store.get("failure")))
    except (DistNetworkError, DistStoreError):
        return Failure(0, group.members[0].host, STORE_IS_GONE) if group.rank else mine


def leave_after_failure(group: Group) -> None:
    """After an exception in the body: without a collective, which other ranks may never reach."""
    release_wrappers()
    abort_process_group()  # the closed connections wake the ranks that wait for this one in a collective
    if group.world_size > 1:
        _sign_off(group, _FAILED_SIGN_OFF_TIMEOUT_S)


def _sign_off(group: Group, timeout_s: float) -> None:
    try:
        group.store.add("bye", 1)
        if group.is_first:
            wait_until(lambda: group.store.add("bye", 0) >= group.world_size, timeout_s)
    except (DistNetworkError, DistStoreError):
        pass  # the host of the store is gone already
