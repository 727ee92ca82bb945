"""Whether the chosen numbers can be true: within bounds, and contradicted by nothing else in the environment."""

from __future__ import annotations

from hpcddp.errors import LaunchError
from hpcddp.ranks.launcher import NUMBERS, is_set_by_launcher
from hpcddp.record import TYPE_CHECKING
from hpcddp.schedulers.allocation import includes_host
from hpcddp.schedulers.registry import all_schedulers
from hpcddp.units import shorten

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hpcddp.ranks.launcher import Candidate, Launcher
    from hpcddp.schedulers.allocation import Allocation

# (smaller, larger, whether they may be equal)
_BOUNDS = (
    ("rank", "world_size", False),
    ("local_rank", "local_world_size", False),
    ("local_rank", "world_size", False),
    ("local_world_size", "world_size", True),
    ("node_rank", "num_nodes", False),
    ("node_rank", "world_size", False),
    ("num_nodes", "world_size", True),
)
_LEFTOVER = "one of the two is a leftover of another launch: unset it, or start the program afresh"


def check_bounds(chosen: Candidate) -> None:
    """LaunchError if the numbers contradict one another."""
    for small, large, may_equal in _BOUNDS:
        a, b = chosen.numbers[small], chosen.numbers[large]
        if a is not None and b is not None and not (a < b or (may_equal and a == b)):
            raise contradiction(chosen, small, f"{chosen.source[large]} says {large} {b}")


def check_torch_variables(chosen: Candidate, env: Mapping[str, str], torch: Launcher) -> None:
    """LaunchError if an exported number (RANK, NODE_RANK, …; `torch` is their row) differs from the launcher's.

    `hpcddp exec` exports them, and people do by hand.
    """
    numbers = [(number, getattr(torch, number)) for number in NUMBERS[:-1]]  # the number of nodes is torchrun's own
    for number, variable in (*numbers, *(("node_rank", name) for name in torch.other_node_ranks)):
        value = chosen.numbers[number]
        if value is not None:
            check_exported(env, {variable: str(value)}, f"{chosen.source[number]} says {number} {value}")


def check_node_rank(env: Mapping[str, str], node_rank: int, torch: Launcher) -> None:
    """The same for the node's number, where not the launcher has said it but the job's list of hosts."""
    names = (torch.node_rank, *torch.other_node_ranks)
    check_exported(env, dict.fromkeys(names, str(node_rank)), f"this is node {node_rank} of the launch")


def check_exported(env: Mapping[str, str], expected: Mapping[str, str], because: str = "") -> None:
    """LaunchError if a variable is exported with another value than expected; "": it must not be set."""
    for name, value in expected.items():
        text = env.get(name, "")
        if text not in {"", value} and not (text == "0" and not value):
            usual = f"this launch sets {name}={value}" if value else "hpcddp sets the rendezvous of the nodes"
            raise LaunchError(f"{because or usual}, but {name}={shorten(text)} is exported too", f"unset {name}")


def check_agent_store(env: Mapping[str, str], rows: Iterable[Launcher]) -> None:
    """LaunchError if torch would wait for an agent that is not there: all ranks clients, and nobody serves."""
    for row in rows:
        value = env.get(row.agent_store, "")
        if value.lower() in {"true", "1"} and not any(is_set_by_launcher(env, mark) for mark in row.marks):
            what = f"{row.agent_store}={value}, but no {row.name} started this process: nobody would serve the store"
            raise LaunchError(what, f"unset {row.agent_store}")


def check_host(chosen: Candidate, env: Mapping[str, str], hostname: str | None, allocation: Allocation) -> None:
    """LaunchError if the allocation holds this host under none of the names that launcher and scheduler know it by."""
    if hostname is None or not allocation.hosts:
        return
    hosts = [host for host, _ in allocation.hosts]
    if not includes_host(hosts, list_host_names(chosen.row, env, hostname)):
        raise LaunchError(
            f"this host is {hostname}, but {allocation.source} does not hold it: {shorten(','.join(hosts))}",
            "start the ranks on the hosts of the allocation, or unset the scheduler's variables if they are others'",
        )


def list_host_names(row: Launcher, env: Mapping[str, str], hostname: str) -> tuple[str, ...]:
    """List this host's names: its own, and those by which its launcher and its scheduler know it."""
    variables = (*row.host, *(scheduler.variables.host for scheduler in all_schedulers()))
    return (hostname, *(env.get(name, "") for name in variables))


def contradiction(chosen: Candidate, number: str, other: str) -> LaunchError:
    """The error for two places that say one number differently."""
    return LaunchError(f"{chosen.source[number]} says {number} {chosen.numbers[number]}, but {other}", _LEFTOVER)
