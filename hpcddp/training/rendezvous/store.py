"""The key-value store that the ranks share before there is a process group: rank 0 serves it, the others find it.

Its address comes from the environment (srun's node list, a verified MASTER_ADDR, `hpcddp exec`), from a file in the run
folder, or, by explicit choice, from MPI. Through a file and MPI, rank 0 tells the port on which it listens already.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError

from hpcddp.errors import LaunchError
from hpcddp.ranks.launch import Launch
from hpcddp.ranks.launcher import RankInfo
from hpcddp.ranks.reach import find_local_address, require_resolved
from hpcddp.ranks.rendezvous import is_enough, is_on_one_node, port_candidates
from hpcddp.runs import rank_0
from hpcddp.runs.folder import RunFolder
from hpcddp.runs.state import check_run_folder
from hpcddp.training.activity import waiting
from hpcddp.training.torch_compat import Store, TCPStore, greet_store, host_tcp_store

FIRST_OPENING = "opening-0"
CHANNELS = ("auto", "env", "file", "mpi4py")
_ANSWER_TIMEOUT_S = 5.0
_NONCE_KEY = "hpcddp/nonce"


def choose_channel(launch: Launch, wanted: str) -> str:
    """Choose one of CHANNELS for "auto": the environment where it is enough, else the run folder. LaunchError if the
    channel does not say where rank 0 is."""
    found, folder = launch.rendezvous, launch.env.get("HPCDDP_RUN_DIR")
    has_env = found.master_addr is not None and found.master_port is not None
    has_file = bool(folder and launch.local_key[0])
    prefers_env = is_enough(found, launch.env, launch.info) or not has_file
    if wanted == "mpi4py":
        return wanted
    if has_env and (wanted == "env" or (wanted == "auto" and prefers_env)):
        return "env"
    if has_file and wanted != "env":
        return "file"
    missing = "a port for the rendezvous" if found.master_addr else "the address of rank 0"
    raise LaunchError(
        f"launcher {launch.info.launcher} does not give the {launch.info.world_size} ranks {missing}",
        "export MASTER_ADDR and MASTER_PORT to all ranks, or ask MPI: rendezvous='mpi4py'",
    )


@contextmanager
def opened_store(launch: Launch, channel: str, opening: str, timeout_s: float) -> Iterator[Store]:
    """The store of this launch, in the body of which all ranks arrive. `opening` distinguishes the groups that one
    process opens. LaunchError if rank 0 is not found."""
    info, key = launch.info, launch.local_key[0]
    nonce = f"{key} with {info.world_size} ranks, {opening}"  # a key may be one given by hand
    channel = choose_channel(launch, channel)
    if channel == "env":
        yield _open_by_env(launch, opening, nonce, timeout_s)
        return
    store = host_store((0,), nonce, timeout_s) if info.rank == 0 else None
    if channel == "mpi4py":
        address, port = ask_mpi(info, 0 if store is None else store.port)
        yield store or reach_store(address, (port,), nonce, timeout_s)
        return
    run = RunFolder(launch.env["HPCDDP_RUN_DIR"])
    folder, name = run.rendezvous, f"{key} {opening}"
    if store is None:
        address, port = rank_0.wait_for_address(folder, name, timeout_s)
        yield reach_store(address, (port,), nonce, timeout_s)
        return
    check_run_folder(run)  # before anything is written there
    # the hosts that will read the file are not known here, so that it gets the name by which they know this one
    address = "127.0.0.1" if is_on_one_node(info) else find_local_address(launch.env, socket.gethostname())
    rank_0.publish_address(folder, name, address, store.port)
    try:
        yield store
    finally:
        rank_0.withdraw_address(folder, name)  # so that no later launch reads it


def _open_by_env(launch: Launch, opening: str, nonce: str, timeout_s: float) -> Store:
    """All ranks try the same ports in the same order."""
    found, key = launch.rendezvous, launch.local_key[0]
    assert found.master_addr is not None
    require_resolved(found.master_addr, found.source["master_addr"], socket.gethostname())
    if opening == FIRST_OPENING:
        ports = (found.master_port, *port_candidates(key or str(found.master_port), 4))
    else:  # the store of an opening before may still listen on that one's port
        ports = (*port_candidates(f"{key} {found.master_port} {opening}", 4), found.master_port)
    tried = tuple(dict.fromkeys(port for port in ports if port is not None))
    if launch.info.rank == 0:
        return host_store(tried, nonce, timeout_s)
    return reach_store(found.master_addr, tried, nonce, timeout_s)


def host_store(ports: tuple[int, ...], nonce: str, timeout_s: float) -> TCPStore:
    """Rank 0's side: the store on the first free port; 0: any. LaunchError if none is free, or if there is a rank 0
    already."""
    for port in ports:
        try:
            store = host_tcp_store(port, timedelta(seconds=timeout_s))
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


def reach_store(address: str, ports: tuple[int, ...], nonce: str, timeout_s: float) -> TCPStore:
    """Every other rank's side: wait for the store of this job on any of the ports. LaunchError if it does not come."""
    found: list[TCPStore] = []

    def look() -> bool:
        stores = (_connect(address, port, nonce, timeout_s) for port in ports)
        found.extend(itertools.islice(filter(None, stores), 1))
        return bool(found)

    if not wait_until(look, timeout_s):
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


@waiting()
def wait_until(is_so: Callable[[], bool], timeout_s: float) -> bool:
    """Ask at growing intervals up to 0.05 s; False when the time is up. (A store's own wait logs its timeouts.)"""
    deadline = time.monotonic() + timeout_s
    pause_s = 0.002
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.05)
    return True


def ask_mpi(info: RankInfo, port: int) -> tuple[str, int]:
    """Rank 0's address and its `port`, broadcast by MPI. LaunchError if MPI counts the ranks otherwise."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"mpi4py cannot be imported: {error}", "pip install mpi4py, built for the MPI that launches"
        ) from error
    comm = MPI.COMM_WORLD
    if (comm.rank, comm.size) != (info.rank, info.world_size):
        raise LaunchError(
            f"MPI says rank {comm.rank} of {comm.size}, {info.launcher} says {info.rank} of {info.world_size}",
            "use the launcher of the MPI that mpi4py was built with; hpcddp env shows it",
        )
    hosts = comm.allgather(socket.gethostname())
    mine = "127.0.0.1" if len(set(hosts)) == 1 else hosts[0]
    address, port = comm.bcast((mine, port), root=0)
    return address, port
