"""Open the process group, and close it so that no rank hangs and none aborts.

The environment is passed in by the edge that read it. Where gloo or NCCL would use a network on which other ranks
cannot reach this one, GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME is written back into it: C++ code reads these variables,
and torch has no other way to set the interface.

The roll call: every rank's record is read before the process group is made, within a short and known time. Without it a
missing rank shows as a timeout of 10 or 30 minutes, a doubled one as another rank's timeout, and two ranks on one GPU
as an NCCL error that does not name them.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # DDP imports it later, and its functions would keep the group as a default
from torch.distributed import DistNetworkError, DistStoreError

from hpcddp.checks.environment import describe_machine, run_checks
from hpcddp.errors import LaunchError, RequestError
from hpcddp.guard.hpcddp_guard import explain_no_gpu
from hpcddp.ranks.device import GPUS_PER_NODE, label_devices, read_gpus_per_node, read_gpus_per_rank
from hpcddp.ranks.launch import Launch
from hpcddp.ranks.launcher import RankInfo
from hpcddp.ranks.launchers import LAUNCHERS
from hpcddp.training.rendezvous.failure import Failure, PeerFailedError, claim_first
from hpcddp.training.rendezvous.group import (
    Group,
    Member,
    Members,
    choose_backend,
    set_threads,
    settle_interface,
    take_devices,
)
from hpcddp.training.rendezvous.store import FIRST_OPENING, opened_store, wait_until
from hpcddp.training.torch_compat import (
    TAKES_DEVICE_ID,
    HashStore,
    PrefixStore,
    Store,
    abort_process_group,
    destroy_process_group,
)
from hpcddp.training.torch_compat import rendezvous as torch_rendezvous

_SIGN_OFF_TIMEOUT_S = 60.0
_FAILED_SIGN_OFF_TIMEOUT_S = 3.0  # some ranks may never come
_ALL_HERE = "all here"

# a process may open one group after another, and the store of the one before may still be there
_openings = itertools.count()


@contextmanager
def open_group(
    env: MutableMapping[str, str],
    *,
    backend: str | None = None,
    timeout_s: float | None = None,
    arrival_timeout_s: float = 300.0,
    rendezvous: str = "auto",
) -> Iterator[Group]:
    """The process group for the time of the `with` body. See `hpcddp.init` for arguments and errors."""
    if dist.is_initialized():
        raise RequestError(
            "this process has a process group already", "leave out init_process_group: hpcddp.init() calls it"
        )
    if backend is not None:
        _check_backend(backend)
    launch = Launch(env, socket.gethostname())
    info = launch.info
    opening = f"opening-{next(_openings)}"
    row = LAUNCHERS.get(info.launcher)
    with ExitStack() as until_all_arrived:
        store: Store
        if info.world_size == 1:
            store = HashStore()
        elif row is not None and env.get(row.agent_store) == "True":
            # the launcher's agent hosts it over restarts of the workers
            found = torch_rendezvous("env://", info.rank, info.world_size, timeout=timedelta(seconds=arrival_timeout_s))
            store = next(found)[0]
        else:
            store = until_all_arrived.enter_context(opened_store(launch, rendezvous, opening, arrival_timeout_s))
        if info.rank == 0 and info.world_size > 1 and opening == FIRST_OPENING:
            for check in run_checks(env, info, describe_machine()):
                print(f"hpcddp: warning: {check}", file=sys.stderr)
        group = _join(env, info, PrefixStore(opening, store), backend, timeout_s, arrival_timeout_s)
    try:
        yield group
    except BaseException as error:
        first = claim_failure(group, error)
        abort_process_group()  # the closed connections wake the ranks that wait for this one in a collective
        _sign_off(group, _FAILED_SIGN_OFF_TIMEOUT_S)
        if first.rank != group.rank:
            raise PeerFailedError(first) from None  # the error here is that a connection broke, on many lines
        raise
    if group.world_size > 1:
        dist.barrier()
    _sign_off(group, _SIGN_OFF_TIMEOUT_S)
    destroy_process_group()


def _check_backend(backend: str) -> None:
    """RequestError where this build of torch has no such backend; one that another package has registered is there.
    Only one may be named: a rank has one device, so that "cpu:gloo,cuda:nccl" is none."""
    known = [name for name in dist.Backend.backend_list if name not in {"undefined", "fake"}]
    here = [name for name in known if dist.is_backend_available(name)]
    if backend not in here:
        raise RequestError(f"torch {torch.__version__} here has no backend {backend!r}", f"one of {', '.join(here)}")


def _join(
    env: MutableMapping[str, str],
    info: RankInfo,
    store: Store,
    backend: str | None,
    timeout_s: float | None,
    arrival_timeout_s: float,
) -> Group:
    # device_count() asks the driver without making a context, so it is safe before set_device
    gpus = label_devices(torch.cuda.device_count(), env)
    cpus = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    no_gpu = "" if gpus else explain_no_gpu(torch)
    me = Member(info.rank, socket.gethostname(), os.getpid(), info.local_rank, cpus, gpus, no_gpu)
    members = call_roll(store, me, info.world_size, arrival_timeout_s) if info.world_size > 1 else (me,)
    if backend is not None:
        env.pop(GPUS_PER_NODE, None)  # what was asked for needs no GPU: the guard need not look
    chosen = backend or choose_backend(members, read_gpus_per_node(env))
    devices = take_devices(chosen, members, info.rank, read_gpus_per_rank(env))
    set_threads(env, members, info.rank)
    if info.world_size > 1:
        settle_interface(env, chosen, me.host, (member.host for member in members), prints=me.rank == 0)
    options: dict[str, Any] = {}
    if timeout_s is not None:
        options["timeout"] = timedelta(seconds=timeout_s)
    if chosen == "nccl" and len(devices) == 1 and TAKES_DEVICE_ID:  # it would bind the group to one
        options["device_id"] = devices[0]
    dist.init_process_group(
        chosen,
        store=PrefixStore("group", store),
        rank=info.rank,
        world_size=info.world_size,
        **options,
    )
    return Group(info.rank, info.world_size, info.launcher, chosen, devices[0], members, store, devices[1:])


def call_roll(store: Store, me: Member, world_size: int, timeout_s: float) -> Members:
    """Every rank's record, by rank.

    If one is missing or two claim the same rank, rank 0 raises LaunchError and the others PeerFailedError.
    """
    claims = store.add(f"claim/{me.rank}", 1)
    if claims > 1:  # the first outcome stays
        twice = f"rank {me.rank} exists {claims} times; one of them is process {me.pid} on {me.host}"
        store.compare_set("outcome", "", twice)
    store.set(f"member/{me.rank}", json.dumps(me))
    keys = [f"member/{rank}" for rank in range(world_size)]
    if me.rank == 0:
        outcome = _ALL_HERE
        if not wait_until(lambda: store.check(keys) or store.check(["outcome"]), timeout_s):
            missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
            shown = ", ".join(missing[:8]) + (", …" if len(missing) > 8 else "")
            outcome = f"{len(missing)} of {world_size} ranks did not arrive in {timeout_s:.0f} s: rank {shown}"
        store.compare_set("outcome", "", outcome)
    try:
        if not wait_until(lambda: store.check(["outcome"]), timeout_s + 30):
            raise LaunchError("rank 0 did not say whether all ranks arrived", "look into the log of rank 0")
        outcome = store.get("outcome").decode()
    except DistNetworkError as error:
        raise LaunchError(
            f"rank 0 left before all ranks had arrived: {error}", "look into the log of rank 0"
        ) from error
    if outcome != _ALL_HERE and me.rank == 0:
        raise LaunchError(
            outcome,
            "look into the logs of those ranks; `hpcddp env` in the same launch line shows what each process sees",
        )
    if outcome != _ALL_HERE:
        raise PeerFailedError(Failure(0, "the first node", outcome))
    members = [Member(*json.loads(record)) for record in store.multi_get(keys)]
    return tuple(member._replace(gpus=tuple(member.gpus)) for member in members)


def claim_failure(group: Group, error: BaseException) -> Failure:
    """The first failure of the run: that of this rank, unless another one's is in the store already."""
    mine = Failure(group.rank, group.host, f"{type(error).__name__}: {error}")
    return claim_first(group.store, mine, group.members[0].host)


def _sign_off(group: Group, timeout_s: float) -> None:
    """Let rank 0, which hosts the store, leave last: no rank closes a connection that another one still needs."""
    with suppress(DistNetworkError, DistStoreError):  # rank 0 is gone already
        group.store.add("bye", 1)
        if group.is_first:
            wait_until(lambda: group.store.add("bye", 0) >= group.world_size, timeout_s)
