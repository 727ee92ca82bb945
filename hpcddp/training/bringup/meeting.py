"""Where the ranks meet: rank 0's address and port, known to all of them before there is a store.

The environment says it (srun's node list, a MASTER_ADDR that was verified, `hpcddp exec`), or a channel does: the
launcher's own key-value store (PMI-1), a file in the run folder, MPI by explicit choice. Through a channel rank 0 can
tell a port that it holds open already, so that nothing can take it in between.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import NamedTuple

from hpcddp.errors import LaunchError, RequestError
from hpcddp.ranks import pmi, sharedfile
from hpcddp.ranks.interfaces import address_toward
from hpcddp.ranks.ports import port_candidates
from hpcddp.ranks.rankinfo import RankInfo
from hpcddp.ranks.reach import INTERFACE, own_address, reached_as, require_resolved
from hpcddp.ranks.rendezvous import find_rendezvous, is_enough, launch_key

CHANNELS = ("auto", "env", "pmi", "file", "mpi4py")


class Meeting(NamedTuple):
    """All ranks try `ports` in order. `listener` is rank 0's open socket on the only port, where it has one."""

    address: str
    ports: tuple[int, ...]
    listener: socket.socket | None
    channel: str
    note: tuple[str, str] | None = None  # folder and key of the file that rank 0 wrote


def end_meeting(meeting: Meeting) -> None:
    """When all ranks have come: take away the file that told them, so that no later launch finds it."""
    if meeting.note is not None:
        sharedfile.withdraw_address(*meeting.note)


def arrange_meeting(env: Mapping[str, str], info: RankInfo, channel: str, opening: str, timeout_s: float) -> Meeting:
    """The meeting of this launch's ranks. `opening` tells the groups that one process opens from one another.

    "auto" takes PMI where the launcher started its socket for this very process, else the environment where it says
    both numbers, else the run folder. LaunchError if none can tell, RequestError for a channel that does not exist.
    """
    if channel not in CHANNELS:
        raise RequestError(f"rendezvous {channel!r} is unknown", f"one of {', '.join(CHANNELS)}")
    if channel == "mpi4py":
        from hpcddp.training.bringup.mpi import ask_mpi

        listener = listen() if info.rank == 0 else None
        address, port = ask_mpi(info, 0 if listener is None else _port(listener))
        return Meeting(address, (port,), listener, channel)
    if channel == "pmi" or (channel == "auto" and _has_pmi(env, info)):
        return _over_pmi(env, info, opening, timeout_s)
    found = find_rendezvous(env, info, hostname=socket.gethostname(), live=True)
    key, _ = launch_key(env, info, live=True)
    folder = env.get("HPCDDP_RUN_DIR", "")
    enough = is_enough(found, env, info) or channel == "env" or not (folder and key)
    if channel != "file" and enough and found.master_addr is not None and found.master_port is not None:
        require_resolved(found.master_addr, found.source["master_addr"], socket.gethostname())
        ports = dict.fromkeys((found.master_port, *port_candidates(key or str(found.master_port), 4)))
        return Meeting(found.master_addr, tuple(ports), None, "env")
    if channel != "env" and folder and key:
        return _over_file(env, f"{folder}/rendezvous", f"{key} {opening}", info, timeout_s)
    missing = "a port for the rendezvous" if found.master_addr else "the address of rank 0"
    raise LaunchError(
        f"launcher {info.launcher} does not tell the {info.world_size} ranks {missing}",
        "export MASTER_ADDR and MASTER_PORT to all ranks, or ask MPI: rendezvous='mpi4py'",
    )


def listen() -> socket.socket:
    """An open listening socket on a free port of every address of this machine, IPv6 and IPv4 where it has both."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _has_pmi(env: Mapping[str, str], info: RankInfo) -> bool:
    """Whether this process may speak PMI: Hydra started it, and no MPI here does so already."""
    import sys

    return info.launcher in {"mpich", "intelmpi"} and "PMI_FD" in env and "mpi4py.MPI" not in sys.modules


def _over_pmi(env: Mapping[str, str], info: RankInfo, opening: str, timeout_s: float) -> Meeting:
    client = pmi.connect(env, timeout_s)
    if client is None:
        raise LaunchError(
            f"launcher {info.launcher} gives this process no PMI socket (PMI_FD is unset or closed)",
            "start the ranks with mpiexec of MPICH or Intel MPI, or leave out rendezvous='pmi'",
        )
    # Rank 0 needs to know another host before it can tell which of its addresses leads there.
    client.put(f"{opening}-host-{info.rank}", socket.gethostname())
    client.barrier()
    listener = None
    told = ""
    if info.rank == 0:
        listener = listen()
        told = f"{_given_address(env, info) or _my_address(client, env, info, opening)}/{_port(listener)}"
    address, _, port = pmi.share_from_rank_0(client, info.rank, f"{opening}-master", told).rpartition("/")
    return Meeting(address, (int(port),), listener, "pmi")


def _over_file(env: Mapping[str, str], folder: str, key: str, info: RankInfo, timeout_s: float) -> Meeting:
    if info.rank != 0:
        address, port = sharedfile.wait_for_address(folder, key, timeout_s)
        return Meeting(address, (port,), None, "file")
    listener = listen()
    # The file is for hosts that are not known here: the name that they know this one by has to do.
    alone = info.local_world_size == info.world_size
    address = "127.0.0.1" if alone else own_address(env, socket.gethostname())
    sharedfile.publish_address(folder, key, address, _port(listener))
    return Meeting(address, (_port(listener),), listener, "file", (folder, key))


def _given_address(env: Mapping[str, str], info: RankInfo) -> str | None:
    """A MASTER_ADDR that somebody chose, perhaps for its network, and that may be right."""
    found = find_rendezvous(env, info, hostname=socket.gethostname(), live=True)
    return (
        found.master_addr if found.source.get("master_addr") == "MASTER_ADDR" and is_enough(found, env, info) else None
    )


def _my_address(client: pmi.PmiClient, env: Mapping[str, str], info: RankInfo, opening: str) -> str:
    """This machine's address on the way to another host of the launch; the loopback address if there is none."""
    here = socket.gethostname()
    hosts = (client.get(f"{opening}-host-{rank}") for rank in range(info.world_size - 1, 0, -1))
    peer = next((host for host in hosts if host != here), None)
    if peer is None:
        return "127.0.0.1"
    return own_address(env, here) if env.get(INTERFACE) else address_toward(reached_as(peer, env)) or here


def _port(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])
