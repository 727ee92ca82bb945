"""Bring the process group up, and take it down so that no rank hangs and none aborts.

The environment is passed in by the edge that read it. One variable is written back into it, where gloo or NCCL would
use a network on which others cannot reach this rank: GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME are read by C++ code,
and there is no other way to say it.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch re-exports it without saying so
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

from hpcddp.checks.environment import run_checks
from hpcddp.checks.machine import look_at_machine
from hpcddp.errors import LaunchError, RequestError
from hpcddp.ranks.rankinfo import RankInfo
from hpcddp.ranks.rendezvous import Rendezvous, launch_key
from hpcddp.ranks.resolve import resolve
from hpcddp.training.bringup.device import list_visible, name_shared, wants_device_id
from hpcddp.training.bringup.failure import PeerFailedError
from hpcddp.training.bringup.farewell import claim_failure, leave, leave_after_failure
from hpcddp.training.bringup.group import Group, device_index
from hpcddp.training.bringup.meeting import Meeting, arrange_meeting, end_meeting
from hpcddp.training.bringup.network import look_around, settle_interface
from hpcddp.training.bringup.roll_call import Member, call_roll
from hpcddp.training.bringup.store import host_store, reach_store

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
    info = resolve(env, live=True)
    opening = f"opening-{next(_openings)}"
    meeting = None
    if info.world_size == 1:
        store: Store = HashStore()
    elif info.launcher == "torchrun" and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = _agent_store(info, arrival_timeout_s)
    else:
        meeting = arrange_meeting(env, info, rendezvous, opening, arrival_timeout_s)
        store = _open_store(env, info, meeting, opening, arrival_timeout_s)
    if info.rank == 0 and info.world_size > 1 and opening == "opening-0":
        _print_checks(env, info, meeting)
    group = _join(env, info, PrefixStore(opening, store), backend, timeout_s, arrival_timeout_s)
    if meeting is not None:
        end_meeting(meeting)
    try:
        yield group
    except BaseException as error:
        first = claim_failure(group, error)
        leave_after_failure(group)
        if first.rank != group.rank:
            raise PeerFailedError(first) from error
        raise
    leave(group)


def _agent_store(info: RankInfo, timeout_s: float) -> Store:
    """The store that torchrun's agent hosts and keeps over restarts of the workers; torch's own function knows it."""
    found = torch_rendezvous("env://", info.rank, info.world_size, timeout=timedelta(seconds=timeout_s))
    store: Store = next(found)[0]
    return store


def _open_store(
    env: MutableMapping[str, str], info: RankInfo, meeting: Meeting, opening: str, timeout_s: float
) -> Store:
    key, _ = launch_key(env, info)
    nonce = f"{key} with {info.world_size} ranks, {opening}"
    if info.rank != 0:
        return reach_store(meeting.address, meeting.ports, nonce, timeout_s)
    return host_store(meeting.ports, info.world_size, nonce, timeout_s, meeting.listener)


def _join(
    env: MutableMapping[str, str],
    info: RankInfo,
    store: Store,
    backend: str | None,
    timeout_s: float | None,
    arrival_timeout_s: float,
) -> Group:
    # device_count() asks the driver without making a context, so it is safe before set_device
    gpus = list_visible(torch.cuda.device_count(), env.get("CUDA_VISIBLE_DEVICES"))
    cpus = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    me = Member(info.rank, socket.gethostname(), os.getpid(), info.local_rank, cpus, gpus)
    members = call_roll(store, me, info.world_size, arrival_timeout_s) if info.world_size > 1 else (me,)
    chosen = backend or ("nccl" if gpus else "gloo")
    device = _choose_device(chosen, members, info.rank)
    _set_threads(env, members, info.rank)
    if info.world_size > 1:
        settle_network(env, chosen, members, me)
    options: dict[str, Any] = {}
    if timeout_s is not None:
        options["timeout"] = timedelta(seconds=timeout_s)
    if chosen == "nccl" and wants_device_id(torch.__version__):
        options["device_id"] = device
    dist.init_process_group(
        chosen,
        store=PrefixStore("group", store),
        rank=info.rank,
        world_size=info.world_size,
        **options,
    )
    return Group(info.rank, info.world_size, info.launcher, chosen, device, members, store)


def _choose_device(backend: str, members: tuple[Member, ...], rank: int) -> torch.device:
    """The rank's device, made current before any collective can guess another one."""
    index = device_index(members, rank, backend)
    if index is None:
        if backend == "nccl":
            host = members[rank].host
            raise LaunchError(
                f"backend nccl, but rank {rank} on {host} sees no GPU", "use the gloo backend, or ask for GPUs"
            )
        return torch.device("cpu")
    if backend == "nccl":
        chosen = [(m, device_index(members, m.rank, backend)) for m in members]
        if shared := name_shared([(m.host, m.gpus[i]) for m, i in chosen if i is not None]):
            raise LaunchError(shared, "give each rank its own GPU: as many GPUs per node as ranks per node")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _set_threads(env: MutableMapping[str, str], members: tuple[Member, ...], rank: int) -> None:
    """Share CPUs among the ranks that may run on them, unless OMP_NUM_THREADS is set; torch takes them all."""
    me = members[rank]
    if "OMP_NUM_THREADS" not in env:
        sharers = sum((m.host, m.cpus) == (me.host, me.cpus) for m in members)
        torch.set_num_threads(max(1, len(me.cpus.split(",")) // sharers))


def _print_checks(env: MutableMapping[str, str], info: RankInfo, meeting: Meeting | None) -> None:
    """Rank 0 says, once, what works against the run."""
    known = Rendezvous(meeting.address, meeting.ports[0], {}) if meeting else Rendezvous(None, None, {})
    for check in run_checks(env, info, known, look_at_machine(env)):
        print(f"hpcddp: warning: {check}", file=sys.stderr)


def settle_network(env: MutableMapping[str, str], backend: str, members: tuple[Member, ...], me: Member) -> None:
    """Set the interface that this backend is to use, before its first group, where it would take one that others cannot
    reach."""
    peer = next((m.host for m in members if m.host != me.host), None)
    setting, remark = settle_interface(env, backend, look_around(me.host, peer, env))
    if setting is not None:
        env[setting[0]] = setting[1]
    if remark and me.rank == 0:
        print(f"hpcddp: {remark}", file=sys.stderr)
