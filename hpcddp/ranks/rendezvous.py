"""Rank 0's address and port, which every rank finds by itself, with one result, or None if it cannot.

A MASTER_ADDR in the environment is a candidate. It is checked against what the launcher and the scheduler say, and
dropped with a remark if they contradict it. Nothing here asks the network. None means: ask through a channel (a shared
file, mpi4py).
"""

from __future__ import annotations

from binascii import crc32

from hpcddp.errors import LaunchError
from hpcddp.ranks.candidates import read_apinfo
from hpcddp.ranks.consistency import list_host_names
from hpcddp.ranks.launchers import LAUNCHERS
from hpcddp.ranks.reach import INTERFACE, SUFFIX, reached_as
from hpcddp.ranks.resolve import launcher_option, launcher_pid
from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.schedulers.allocation import includes_host, is_address, is_alias, is_loopback
from hpcddp.schedulers.registry import find_scheduler
from hpcddp.units import read_number, shorten

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpcddp.ranks.launch import Launch
    from hpcddp.ranks.launcher import RankInfo

_LOWEST, _COUNT = 12000, 20000  # ports below those that Linux hands out for outgoing connections


def port_candidates(key: str, count: int = 16) -> tuple[int, ...]:
    """The first ports to try for this key, all different: `count` of them, or fewer by chance."""
    sums = (crc32(f"{key}#{attempt}".encode(errors="surrogateescape")) for attempt in range(count))
    return tuple(dict.fromkeys(_LOWEST + each % _COUNT for each in sums))


def port_in_shell(number: str) -> str:
    """A port of the same range, for an expression of a shell: of `number`, a variable or an expression itself."""
    return f"$(({_LOWEST} + {number} % {_COUNT}))"


class Rendezvous(Record):
    """Rank 0's address and port, the source of each, and what was rejected on the way, for people."""

    master_addr: str | None
    master_port: int | None
    source: Mapping[str, str]
    remarks: tuple[str, ...] = ()


class _HostOfRank0(Record):
    """Rank 0's host as the launcher says it; `name` is None where it does not. `is_final`: nothing else is believed,
    not even the first host of the job."""

    name: str | None = None
    source: str = ""
    is_final: bool = False


def find_rendezvous(launch: Launch) -> Rendezvous:
    """The rendezvous of a launch. A single process without a launcher needs none: both None.

    LaunchError on a MASTER_PORT that is no port, and, if the launch is `strict`, on rank 0 when the address that all
    other ranks will take is not this host (they would wait for nobody); else that is None and a remark.
    """
    env, info, hostname = launch.env, launch.info, launch.hostname
    if info.launcher == "none":
        return Rendezvous(None, None, {})
    address, because, remarks = _find_address(launch)
    if address is not None and _is_elsewhere(address, launch):
        if launch.strict:
            raise LaunchError(
                f"rank 0 is on {hostname}, but the other ranks will look for it on {address} ({because})",
                f"export MASTER_ADDR={hostname} to all ranks, or start rank 0 on {address}",
            )
        remarks += (f"{address} ({because}) is not used: rank 0 is here, on {hostname}",)
        address = None
    if address is not None and because != "MASTER_ADDR" and not is_on_one_node(info):
        called = reached_as(address, env)
        address, because = called, because if called == address else f"{because}, with {SUFFIX}={env[SUFFIX]}"
    source = {} if address is None else {"master_addr": because}
    port, because = _find_port(launch)
    if port is not None:
        source["master_port"] = because
    return Rendezvous(address, port, source, remarks)


def is_enough(found: Rendezvous, env: Mapping[str, str], info: RankInfo) -> bool:
    """Whether the ranks can meet by this alone. Where a site names an interface (HPCDDP_INTERFACE), they need rank 0's
    address there, which only rank 0 knows; without a channel the name has to do."""
    if found.master_addr is None or found.master_port is None:
        return False
    return not env.get(INTERFACE) or is_address(found.master_addr) or is_on_one_node(info)


def is_on_one_node(info: RankInfo) -> bool:
    """Whether all ranks are certainly on this node."""
    return info.local_world_size == info.world_size


def _find_address(launch: Launch) -> tuple[str | None, str, tuple[str, ...]]:
    info, given = launch.info, launch.env.get("MASTER_ADDR", "")
    rank_0 = _where_rank_0_is(launch)
    remarks: tuple[str, ...] = ()
    if given:
        fault = _fault_of(given, rank_0, launch)
        if not fault:
            return given, "MASTER_ADDR", ()
        remarks = (f"MASTER_ADDR={given} is not used: {fault}",)
    if rank_0.is_final:
        return rank_0.name, rank_0.source, remarks
    if is_on_one_node(info):
        return "127.0.0.1", f"{info.source['local_world_size']} (all ranks are on this node)", remarks
    allocation = launch.allocation
    if allocation is not None and allocation.hosts and not LAUNCHERS[info.launcher].rank_0_anywhere:
        return allocation.hosts[0][0], f"{allocation.source} (first host)", remarks
    return None, "", remarks


def _where_rank_0_is(launch: Launch) -> _HostOfRank0:
    row = LAUNCHERS[launch.info.launcher]
    if row.step is not None:
        return _HostOfRank0(*row.step.find_rank_0(launch.env, launch.info), is_final=True)
    path = launch.env.get(row.layout_file, "")
    layout = read_apinfo(path) if path else None
    if layout is not None and layout.node_of:
        return _HostOfRank0(layout.hosts[layout.node_of[0]], f"{row.layout_file} ({path})", is_final=True)
    return _HostOfRank0()


def _fault_of(given: str, rank_0: _HostOfRank0, launch: Launch) -> str:
    """Why a MASTER_ADDR cannot be right; empty if it can.

    An address cannot be compared with a name here. A script's is one for all launches in it, so the launcher's own
    word stands above it; one that was exported together with RANK was made for this launch, by `hpcddp exec`.
    """
    info, allocation = launch.info, launch.allocation
    if is_loopback(given):
        several = (info.num_nodes or 1) > 1 or (info.local_world_size or info.world_size) < info.world_size
        return "it is this machine itself, and there are several nodes" if several else ""
    if rank_0.name and not is_alias(given, rank_0.name) and not (is_address(given) and "RANK" in launch.env):
        return f"rank 0 is on {rank_0.name}, by {rank_0.source}"
    if allocation is None or not allocation.hosts or is_address(given) or LAUNCHERS[info.launcher].sets_master:
        return ""
    known = includes_host([host for host, _ in allocation.hosts], (given,))
    return "" if known else f"{allocation.source} does not hold it"


def _is_elsewhere(address: str, launch: Launch) -> bool:
    """Whether this is rank 0, and this host is known, and the address is certainly another's."""
    row, hostname = LAUNCHERS[launch.info.launcher], launch.hostname
    if launch.info.rank != 0 or hostname is None or is_address(address) or is_loopback(address) or row.sets_master:
        return False
    return not includes_host((address,), list_host_names(row, launch.env, hostname))


def _find_port(launch: Launch) -> tuple[int | None, str]:
    text = launch.env.get("MASTER_PORT", "")
    if text:
        given = read_number(text)
        if given is None or not 0 < given < 65536:
            raise LaunchError(f"MASTER_PORT={shorten(text)!r} is not a port", "unset MASTER_PORT, or give 1 to 65535")
        return given, "MASTER_PORT"
    key, because = launch.local_key
    return (port_candidates(key, 1)[0], f"{because} (a port derived from it)") if key else (None, "")


def find_key(launch: Launch) -> tuple[str, str]:
    """A text that is the same on all ranks of this launch and on no other's, and where it came from. Empty: there is
    none.

    Made only of what every rank has: a job id is missing where mpirun came by ssh, and under mpirun a step id belongs
    to some of its daemons. Two launches of one job may have attempts of one name, in two run folders.
    """
    env, row = launch.env, LAUNCHERS.get(launch.info.launcher)
    names = [name for name in (row.launch_id if row is not None else ()) if env.get(name)]
    option = row.launch_option if row is not None and launch.live else ""
    if row is not None and option and (value := launcher_option(row.programs, option)):
        return f"{row.name} {value}", f"{row.name}'s {option} {value}"
    if not names and env.get("HPCDDP_ATTEMPT"):
        names = [name for name in ("HPCDDP_ATTEMPT", "HPCDDP_RUN_DIR") if env.get(name)]
    if names:
        return "|".join(env[name] for name in names), ", ".join(names)
    allocation = launch.allocation
    if allocation is not None and allocation.job_id:
        says = find_scheduler(allocation.scheduler).variables
        words = [allocation.scheduler, allocation.job_id, env.get(says.restarts, "")]
        ids = [name for name in says.job_id if name in env]
        return "|".join(words), (*ids, allocation.scheduler)[0]
    return "", ""


def find_parent_key(info: RankInfo) -> tuple[str, str]:
    """A key and its source for ranks that are all on this node: the process that started them. Else both empty."""
    pid = launcher_pid() if is_on_one_node(info) else None
    return (f"pid {pid}", f"the launcher, pid {pid}") if pid else ("", "")
