"""The address of the store: rank 0's address and port, known to all ranks before they connect.

They come from the environment (srun's node list, a verified MASTER_ADDR, `hpcddp exec`) or through a channel: the
launcher's own key-value store (PMI-1), a file in the run folder, or MPI by explicit choice. Through a channel rank 0
sends a port that it holds open already, so that no other program can take it.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import NamedTuple

from hpcddp.errors import LaunchError
from hpcddp.ranks import pmi
from hpcddp.ranks.interfaces import address_toward
from hpcddp.ranks.launch import Launch
from hpcddp.ranks.launcher import RankInfo
from hpcddp.ranks.launchers import LAUNCHERS
from hpcddp.ranks.reach import INTERFACE, find_local_address, open_listener, reached_as, require_resolved
from hpcddp.ranks.rendezvous import is_enough, port_candidates
from hpcddp.runs import rank_0
from hpcddp.runs.folder import RunFolder
from hpcddp.runs.state import check_run_folder

FIRST_OPENING = "opening-0"
CHANNELS = ("auto", "env", "pmi", "file", "mpi4py")


class StoreAddress(NamedTuple):
    """All ranks try `ports` in order. `listener` is rank 0's open socket on the only port, where it has one."""

    address: str
    ports: tuple[int, ...]
    listener: socket.socket | None
    channel: str
    note: tuple[str, str] | None = None  # folder and key of the file that rank 0 wrote


def withdraw_store_address(address: StoreAddress) -> None:
    """When all ranks have arrived: remove the file with the address, so that no later launch reads it."""
    if address.note is not None:
        rank_0.withdraw_address(*address.note)


def agree_on_store_address(launch: Launch, channel: str, opening: str, timeout_s: float) -> StoreAddress:
    """The address on which the ranks of this launch agree. `opening` distinguishes the groups that one process opens.

    "auto" takes PMI where the launcher opened its socket for this process, else the environment where it has address
    and port, else the run folder. `channel` is one of CHANNELS. LaunchError if none has them.
    """
    env, info = launch.env, launch.info
    if channel == "mpi4py":
        listener = open_listener() if info.rank == 0 else None
        address, port = ask_mpi(info, 0 if listener is None else _port(listener))
        return StoreAddress(address, (port,), listener, channel)
    if channel == "pmi" or (channel == "auto" and _has_pmi(env, info)):
        return _over_pmi(launch, opening, timeout_s)
    found, (key, _) = launch.rendezvous, launch.local_key
    folder = env.get("HPCDDP_RUN_DIR", "")
    enough = is_enough(found, env, info) or channel == "env" or not (folder and key)
    if channel != "file" and enough and found.master_addr is not None and found.master_port is not None:
        require_resolved(found.master_addr, found.source["master_addr"], socket.gethostname())
        return StoreAddress(found.master_addr, _choose_ports(found.master_port, key, opening), None, "env")
    if channel != "env" and folder and key:
        return _over_file(env, RunFolder(folder), f"{key} {opening}", info, timeout_s)
    missing = "a port for the rendezvous" if found.master_addr else "the address of rank 0"
    raise LaunchError(
        f"launcher {info.launcher} does not give the {info.world_size} ranks {missing}",
        "export MASTER_ADDR and MASTER_PORT to all ranks, or ask MPI: rendezvous='mpi4py'",
    )


def _choose_ports(given: int, key: str | None, opening: str) -> tuple[int, ...]:
    """The ports to try, alike on every rank. The store of an opening before may still listen on that one's."""
    if opening == FIRST_OPENING:
        return tuple(dict.fromkeys((given, *port_candidates(key or str(given), 4))))
    return tuple(dict.fromkeys((*port_candidates(f"{key} {given} {opening}", 4), given)))


def _has_pmi(env: Mapping[str, str], info: RankInfo) -> bool:
    """Whether this process may speak PMI: Hydra started it, and no MPI here does so already."""
    import sys

    row = LAUNCHERS.get(info.launcher)
    return row is not None and row.pmi_socket and "PMI_FD" in env and "mpi4py.MPI" not in sys.modules


def _over_pmi(launch: Launch, opening: str, timeout_s: float) -> StoreAddress:
    env, info = launch.env, launch.info
    client = pmi.connect(env, timeout_s)
    if client is None:
        serving = " or ".join(dict.fromkeys(row.name for row in LAUNCHERS.values() if row.pmi_socket and row.program))
        raise LaunchError(
            f"launcher {info.launcher} gives this process no PMI socket (PMI_FD is unset or closed)",
            f"start the ranks with the launcher {serving}, or leave out rendezvous='pmi'",
        )
    # Rank 0 needs the name of another host to find out which of its own addresses that host can reach.
    client.put(f"{opening}-host-{info.rank}", socket.gethostname())
    client.barrier()
    listener = None
    address_of_rank_0 = ""
    if info.rank == 0:
        listener = open_listener()
        address_of_rank_0 = f"{_given_address(launch) or _my_address(client, env, info, opening)}/{_port(listener)}"
    address, _, port = pmi.share_from_rank_0(client, info.rank, f"{opening}-master", address_of_rank_0).rpartition("/")
    return StoreAddress(address, (int(port),), listener, "pmi")


def _over_file(env: Mapping[str, str], run: RunFolder, key: str, info: RankInfo, timeout_s: float) -> StoreAddress:
    folder = run.rendezvous
    if info.rank != 0:
        address, port = rank_0.wait_for_address(folder, key, timeout_s)
        return StoreAddress(address, (port,), None, "file")
    check_run_folder(run)  # before anything is written there
    listener = open_listener()
    # The hosts that will read the file are not known here, so that it gets the name by which they know this one.
    alone = info.local_world_size == info.world_size
    address = "127.0.0.1" if alone else find_local_address(env, socket.gethostname())
    rank_0.publish_address(folder, key, address, _port(listener))
    return StoreAddress(address, (_port(listener),), listener, "file", (folder, key))


def _given_address(launch: Launch) -> str | None:
    """MASTER_ADDR, which the user may have chosen for its network, if nothing contradicts it."""
    found = launch.rendezvous
    is_given = found.source.get("master_addr") == "MASTER_ADDR"
    return found.master_addr if is_given and is_enough(found, launch.env, launch.info) else None


def _my_address(client: pmi.PmiClient, env: Mapping[str, str], info: RankInfo, opening: str) -> str:
    """This machine's address on the way to another host of the launch; the loopback address if there is none."""
    here = socket.gethostname()
    hosts = (client.get(f"{opening}-host-{rank}") for rank in range(info.world_size - 1, 0, -1))
    peer = next((host for host in hosts if host != here), None)
    if peer is None:
        return "127.0.0.1"
    return find_local_address(env, here) if env.get(INTERFACE) else address_toward(reached_as(peer, env)) or here


def _port(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


# Rank 0's address over MPI itself, for launchers whose environment does not give it. Only imported when asked for by
# name.


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
