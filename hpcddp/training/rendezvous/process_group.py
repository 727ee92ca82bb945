"""Open the process group, and close it so that no rank hangs and none aborts.

The environment is passed in by the edge that read it. Where gloo or NCCL would use a network on which other ranks
cannot reach this one, GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME is written back into it: C++ code reads these variables,
and torch has no other way to set the interface.
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
import torch.distributed.nn  # DDP imports it later, and its functions would keep the group as a default

from hpcddp.checks.environment import run_checks
from hpcddp.checks.machine import look_at_machine
from hpcddp.errors import RequestError
from hpcddp.guard.hpcddp_guard import explain_no_gpu
from hpcddp.ranks.device import GPUS_PER_NODE, label_devices, read_gpus_per_node, read_gpus_per_rank
from hpcddp.ranks.launch import Launch
from hpcddp.ranks.launchers import LAUNCHERS
from hpcddp.ranks.rankinfo import RankInfo
from hpcddp.ranks.rendezvous import Rendezvous
from hpcddp.training.rendezvous.backend import check_backend
from hpcddp.training.rendezvous.device import choose_backend, set_threads, take_devices
from hpcddp.training.rendezvous.failure import PeerFailedError
from hpcddp.training.rendezvous.group import Group
from hpcddp.training.rendezvous.network import look_around, settle_interface
from hpcddp.training.rendezvous.roll_call import Member, call_roll
from hpcddp.training.rendezvous.shutdown import claim_failure, leave, leave_after_failure
from hpcddp.training.rendezvous.store import host_store, reach_store
from hpcddp.training.rendezvous.store_address import (
    FIRST_OPENING,
    StoreAddress,
    agree_on_store_address,
    withdraw_store_address,
)
from hpcddp.training.torch_compat import HashStore, PrefixStore, Store, takes_device_id
from hpcddp.training.torch_compat import rendezvous as torch_rendezvous

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
        check_backend(backend)
    launch = Launch(env, socket.gethostname())
    info = launch.info
    opening = f"opening-{next(_openings)}"
    row = LAUNCHERS.get(info.launcher)
    address = None
    if info.world_size == 1:
        store: Store = HashStore()
    elif row is not None and env.get(row.agent_store) == "True":
        store = _agent_store(info, arrival_timeout_s)
    else:
        address = agree_on_store_address(launch, rendezvous, opening, arrival_timeout_s)
        store = _open_store(launch, address, opening, arrival_timeout_s)
    if info.rank == 0 and info.world_size > 1 and opening == FIRST_OPENING:
        _print_checks(env, info, address)
    group = _join(env, info, PrefixStore(opening, store), backend, timeout_s, arrival_timeout_s)
    if address is not None:
        withdraw_store_address(address)
    try:
        yield group
    except BaseException as error:
        first = claim_failure(group, error)
        leave_after_failure(group)
        if first.rank != group.rank:
            raise PeerFailedError(first) from None  # the error here is that a connection broke, on many lines
        raise
    leave(group)


def _agent_store(info: RankInfo, timeout_s: float) -> Store:
    """The store that the launcher's agent hosts over restarts of the workers; torch's own function finds it."""
    found = torch_rendezvous("env://", info.rank, info.world_size, timeout=timedelta(seconds=timeout_s))
    store: Store = next(found)[0]
    return store


def _open_store(launch: Launch, address: StoreAddress, opening: str, timeout_s: float) -> Store:
    info, (key, _) = launch.info, launch.key
    nonce = f"{key} with {info.world_size} ranks, {opening}, ports {address.ports}"  # a key may be one given by hand
    if info.rank != 0:
        return reach_store(address.address, address.ports, nonce, timeout_s, info.world_size)
    return host_store(address.ports, info.world_size, nonce, timeout_s, address.listener)


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
        settle_network(env, chosen, members, me)
    options: dict[str, Any] = {}
    if timeout_s is not None:
        options["timeout"] = timedelta(seconds=timeout_s)
    if chosen == "nccl" and len(devices) == 1 and takes_device_id():  # it would bind the group to one
        options["device_id"] = devices[0]
    dist.init_process_group(
        chosen,
        store=PrefixStore("group", store),
        rank=info.rank,
        world_size=info.world_size,
        **options,
    )
    return Group(info.rank, info.world_size, info.launcher, chosen, devices[0], members, store, devices[1:])


def _print_checks(env: MutableMapping[str, str], info: RankInfo, address: StoreAddress | None) -> None:
    """Rank 0 prints, once, what may slow the run down or make it fail."""
    known = Rendezvous(address.address, address.ports[0], {}) if address else Rendezvous(None, None, {})
    for check in run_checks(env, info, known, look_at_machine(env)):
        print(f"hpcddp: warning: {check}", file=sys.stderr)


def settle_network(env: MutableMapping[str, str], backend: str, members: tuple[Member, ...], me: Member) -> None:
    """Set the interface for this backend, before its first group, where it would take one that others cannot reach."""
    peer = next((m.host for m in members if m.host != me.host), None)
    setting, remark = settle_interface(env, backend, look_around(me.host, peer, env))
    if setting is not None:
        env[setting[0]] = setting[1]
    if remark and me.rank == 0:
        print(f"hpcddp: {remark}", file=sys.stderr)
