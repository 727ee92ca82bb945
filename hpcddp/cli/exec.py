"""`hpcddp exec -- command …`: the one door into a rank.

Every rendered launcher line ends in it. It resolves this process's rank from what the launcher set, exports torch's
variables, and becomes the command, so that any `env://` script runs under mpirun or srun unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from hpcddp.cli import attempt
from hpcddp.cli.parser import VerbParser
from hpcddp.errors import LaunchError, RequestError

TYPE_CHECKING = False  # typing costs a quarter of this verb's time; mypy knows the name
if TYPE_CHECKING:
    import argparse

    from hpcddp.ranks.rankinfo import RankInfo
    from hpcddp.ranks.rendezvous import Rendezvous


def build_parser() -> VerbParser:
    """The options of `hpcddp exec`."""
    parser = VerbParser("exec", __doc__ or "")
    parser.usage = "hpcddp exec -- command [argument ...]"
    return parser


def torch_variables(info: RankInfo, rendezvous: Rendezvous) -> dict[str, str]:
    """What torch's `env://` start reads. Raises LaunchError where the environment cannot say a number."""
    values = {
        "RANK": info.rank,
        "WORLD_SIZE": info.world_size,
        "LOCAL_RANK": info.local_rank,
        "LOCAL_WORLD_SIZE": info.local_world_size,
        "GROUP_RANK": info.node_rank,
        "MASTER_ADDR": rendezvous.master_addr,
        "MASTER_PORT": rendezvous.master_port,
    }
    if info.world_size == 1:
        # Nobody else has to find a single process: any free port of its own machine will do.
        values["MASTER_ADDR"] = rendezvous.master_addr or "127.0.0.1"
        values["MASTER_PORT"] = rendezvous.master_port or _free_port()
    # torchrun's name for the node's index; no environment of a plain mpirun tells it, and no env:// script needs it.
    missing = [name for name, value in values.items() if value is None and name != "GROUP_RANK"]
    if missing:
        raise LaunchError(
            f"the environment of {info.launcher} does not say {', '.join(missing)}"
            f" (rank {info.rank} of {info.world_size})",
            "give every rank MASTER_ADDR=<host of rank 0> and MASTER_PORT, or use a script of `hpcddp render`",
        )
    return {name: str(value) for name, value in values.items() if value is not None}


def run(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Become `args.command` as this rank; returns only if that fails."""
    if not args.command:
        raise RequestError("there is no command to run", "hpcddp exec -- python train.py")
    import socket

    from hpcddp.ranks.reach import require_resolved
    from hpcddp.ranks.rendezvous import find_rendezvous, is_enough
    from hpcddp.ranks.resolve import resolve

    hostname = socket.gethostname()
    info = resolve(env, hostname=hostname, live=True)
    rendezvous = find_rendezvous(env, info, hostname=hostname, live=True)
    if info.world_size > 1 and not is_enough(rendezvous, env, info):
        rendezvous = _ask_run_folder(env, info, hostname) or rendezvous
    if info.world_size > 1 and rendezvous.master_addr is not None:
        require_resolved(rendezvous.master_addr, rendezvous.source["master_addr"], hostname)
    exported = dict(env) | torch_variables(info, rendezvous)
    # Left by an outer torchrun, it would turn every rank into a client of a store that nobody serves.
    if info.launcher != "torchrun":
        exported.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    job_output = os.dup(2)  # closed by exec
    attempt.record_rank(exported, info.rank, hostname)
    try:
        os.execvpe(args.command[0], args.command, exported)
    except OSError as error:
        if attempt.is_first_to_fail(exported):
            os.dup2(job_output, 2)
        raise LaunchError(
            f"rank {info.rank} on {hostname} cannot run {args.command[0]!r}: {error.strerror}",
            "check the command's spelling, and that it is on PATH on every node",
        ) from error


def _ask_run_folder(env: Mapping[str, str], info: RankInfo, hostname: str) -> Rendezvous | None:
    """The rendezvous through a file in the run folder, the only channel that a process may use and then become another:
    PMI and MPI would wait for a `finalize` that nobody sends. None without a run folder or a key for the launch.
    """
    from hpcddp.ranks import sharedfile
    from hpcddp.ranks.ports import ephemeral_range, port_candidates
    from hpcddp.ranks.reach import own_address
    from hpcddp.ranks.rendezvous import Rendezvous, launch_key

    key, _ = launch_key(env, info, live=True)
    run_dir = env.get("HPCDDP_RUN_DIR", "")
    ports = port_candidates(key, ephemeral=ephemeral_range()) if key else ()
    if not run_dir or not ports:
        return None
    folder = os.path.join(run_dir, "rendezvous")
    if info.rank == 0:
        address = "127.0.0.1" if info.local_world_size == info.world_size else own_address(env, hostname)
        # Taken in order, so that a launch that follows in the same attempt is told the same and no stale file misleads.
        port = next((port for port in ports if _is_free(port)), ports[0])
        sharedfile.publish_address(folder, key, address, port)
    address, port = sharedfile.wait_for_address(folder, key)
    path = sharedfile.address_path(folder, key)
    return Rendezvous(address, port, {"master_addr": path, "master_port": path})


def _is_free(port: int) -> bool:
    import socket

    # as torch's store listens: on every address, IPv6 and IPv4
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
