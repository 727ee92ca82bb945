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
from contextlib import contextmanager, suppress
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
from hpcddp.ranks.network import set_interface
from hpcddp.training.rendezvous.failure import Failure, PeerFailedError, claim_first
from hpcddp.training.rendezvous.group import Group, choose_backend, set_threads, take_devices
from hpcddp.training.rendezvous.roll_call import Member, call_roll, wait_until
from hpcddp.training.rendezvous.store_address import (
    FIRST_OPENING,
    StoreAddress,
    agree_on_store_address,
    withdraw_store_address,
)
from hpcddp.training.torch_compat import (
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
    abort_process_group,
    destroy_process_group,
    greet_store,
    host_tcp_store,
    release_wrappers,
    takes_device_id,
)
from hpcddp.training.torch_compat import rendezvous as torch_rendezvous

_NO_REAL_ONES = ("undefined", "fake")  # torch's own names for none and for one that sends nothing


def check_backend(backend: str) -> None:
    """RequestError where this build of torch has no such backend.

    One that another package has registered (`torch.distributed.Backend.register_backend`) is there. Only one may be
    named: a rank has one device, so that "cpu:gloo,cuda:nccl" is none.
    """
    known = [name for name in dist.Backend.backend_list if name not in _NO_REAL_ONES]
    here = [name for name in known if dist.is_backend_available(name)]
    if backend not in here:
        raise RequestError(f"torch {torch.__version__} here has no backend {backend!r}", f"one of {', '.join(here)}")


# The key-value store that the ranks share before there is a process group.


_ANSWER_TIMEOUT_S = 5.0
_NONCE_KEY = "hpcddp/nonce"


def host_store(
    ports: tuple[int, ...], world_size: int, nonce: str, timeout_s: float, listener: socket.socket | None = None
) -> TCPStore:
    """Rank 0's side: the store on the first free port. LaunchError if none is free, or if there is a rank 0 already.

    `listener` is a socket that listens on the only port already, so that no other program can take that port.
    """
    limit = timedelta(seconds=timeout_s)
    for port in ports:
        try:
            store = host_tcp_store(port, world_size, limit, listener)
        except DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise LaunchError(
                    f"rank 0 cannot listen on port {port}: {error}", "set MASTER_PORT to another port"
                ) from error
            if _connect("localhost", port, nonce, _ANSWER_TIMEOUT_S) is not None:
                raise LaunchError(
                    f"two processes of this job say that they are rank 0 (the other one listens on port {port})",
                    "start the ranks with a launcher that numbers them; hpcddp env shows it",
                ) from error
            continue
        store.set(_NONCE_KEY, nonce)
        return store
    raise LaunchError(
        f"ports {', '.join(map(str, ports))} are all in use on {socket.gethostname()}", "set MASTER_PORT to a free port"
    )


def reach_store(
    address: str, ports: tuple[int, ...], nonce: str, timeout_s: float, askers: int | None = None
) -> TCPStore:
    """Every other rank's side: waits for the store of this job on any of the ports. `askers`: see `wait_until`."""
    found: list[TCPStore] = []

    def look() -> bool:
        stores = (_connect(address, port, nonce, timeout_s) for port in ports)
        found.extend(itertools.islice(filter(None, stores), 1))
        return bool(found)

    if not wait_until(look, timeout_s, askers):
        raise LaunchError(
            f"rank 0 was not found at {address}, ports {', '.join(map(str, ports))}, within {timeout_s:.0f} s",
            "check that rank 0 started (its log comes first), and that the nodes reach each other under this address",
        )
    return found[0]


def _connect(address: str, port: int, nonce: str, timeout_s: float) -> TCPStore | None:
    """A client of this job's store there, or None if there is none."""
    try:
        # TCPStore itself would retry a refused connection until its timeout, and never try the next port
        with socket.create_connection((address, port), timeout=_ANSWER_TIMEOUT_S) as connection:
            greet_store(connection)
        store = TCPStore(address, port, None, False, timedelta(seconds=timeout_s), wait_for_workers=False)
        has_nonce = wait_until(lambda: store.check([_NONCE_KEY]), _ANSWER_TIMEOUT_S)
        return store if has_nonce and store.get(_NONCE_KEY) == nonce.encode() else None
    except socket.gaierror as error:
        raise LaunchError(
            f"the master address {address!r} does not resolve on {socket.gethostname()}: {error.strerror}",
            "set MASTER_ADDR to a name or address of rank 0's node that every node can resolve",
        ) from error
    except (OSError, DistNetworkError, DistStoreError):
        return None


# Leave a process group in an order in which no rank closes a connection that another rank still needs.


_SIGN_OFF_TIMEOUT_S = 60.0
_FAILED_SIGN_OFF_TIMEOUT_S = 3.0  # some ranks may never come


def leave(group: Group) -> None:
    """The normal end: wait for all ranks, release the wrappers, and let the host of the store leave last."""
    if group.world_size > 1:
        release_wrappers()
        dist.barrier()
        _sign_off(group, _SIGN_OFF_TIMEOUT_S)
    destroy_process_group()


def claim_failure(group: Group, error: BaseException) -> Failure:
    """The first failure of the run: that of this rank, unless another one's is in the store already."""
    mine = Failure(group.rank, group.host, f"{type(error).__name__}: {error}")
    return claim_first(group.store, mine, group.members[0].host)


def leave_after_failure(group: Group) -> None:
    """Leave the group after an exception in the body, without a collective, which other ranks may never reach."""
    if group.world_size > 1:
        release_wrappers()
    abort_process_group()  # the closed connections wake the ranks that wait for this one in a collective
    if group.world_size > 1:
        _sign_off(group, _FAILED_SIGN_OFF_TIMEOUT_S)


def _sign_off(group: Group, timeout_s: float) -> None:
    with suppress(DistNetworkError, DistStoreError):  # the host of the store is gone already
        group.store.add("bye", 1)
        if group.is_first:
            wait_until(lambda: group.store.add("bye", 0) >= group.world_size, timeout_s)


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
        _print_checks(env, info)
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


def _print_checks(env: MutableMapping[str, str], info: RankInfo) -> None:
    """Rank 0 prints, once, what may slow the run down or make it fail."""
    for check in run_checks(env, info, describe_machine()):
        print(f"hpcddp: warning: {check}", file=sys.stderr)


def settle_network(env: MutableMapping[str, str], backend: str, members: tuple[Member, ...], me: Member) -> None:
    """Set the interface for this backend, before its first group, where it would take one that others cannot reach."""
    peer = next((m.host for m in members if m.host != me.host), None)
    remark = set_interface(env, backend, me.host, peer)
    if remark and me.rank == 0:
        print(f"hpcddp: {remark}", file=sys.stderr)
