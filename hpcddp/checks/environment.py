"""The checks of one rank's environment. Each gives a Check, or None where all is well or cannot be known."""

from __future__ import annotations

import os

from hpcddp.ranks.launchers import LAUNCHERS
from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.schedulers.allocation import expand_counts
from hpcddp.units import format_count, read_number

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpcddp.ranks.launcher import RankInfo

#: The states of a check. A warning works against the run, although that may go on.
OK, WARNING, FAILED, NOT_CHECKED = "ok", "warning", "failed", "not asked"


class Check(Record):
    """The result of one check. `remedy` is something to do."""

    name: str
    message: str
    remedy: str = ""
    state: str = WARNING

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}"


class Machine(Record):
    """Properties of this host for the checks. None: unknown, as for a recorded environment."""

    cpus: int | None = None  # that this process may use
    cores: int | None = None  # of the host, as the kernel counts
    memlock: int | None = None  # bytes that may be locked; -1: no limit
    infiniband: bool = False


def run_checks(env: Mapping[str, str], info: RankInfo, machine: Machine) -> list[Check]:
    """Every finding, in a fixed order; none of a process that no launcher started."""
    if info.launcher == "none":
        return []
    found = (
        check_agents_per_node(env, info),
        check_cpus_per_rank(env, info, machine),
        check_threads(env, info, machine),
        check_memlock(machine),
    )
    return [check for check in found if check is not None]


def check_agents_per_node(env: Mapping[str, str], info: RankInfo) -> Check | None:
    """An agent starts all ranks of a node by itself: one agent per node, not one per task."""
    row = LAUNCHERS.get(info.launcher)
    if row is None or not row.is_node_agent:
        return None
    for outer in LAUNCHERS.values():
        text = env.get(outer.local_world_size, "") if outer.depth < row.depth else ""
        started = max(expand_counts(text) if text else (), default=1)
        if started > 1:
            each = info.local_world_size or 1
            program = outer.command.partition(" ")[0]
            message = f"{program} started {info.launcher} {started} times on a node ({outer.local_world_size}={text})"
            return Check(
                f"one {info.launcher} per node",
                f"{message}, each with {format_count(each, 'rank')}",
                f"start it once per node, or start the ranks by {program} alone",
            )
    return None


def check_cpus_per_rank(env: Mapping[str, str], info: RankInfo, machine: Machine) -> Check | None:
    """A launcher that does not take over the job's CPUs per rank by itself has to be given them."""
    row = LAUNCHERS.get(info.launcher)
    if row is None or row.cpus_per_rank is None:
        return None
    of_job, to_launcher = row.cpus_per_rank
    requested = read_number(env.get(of_job, ""))
    if requested is None or machine.cpus is None or machine.cpus >= requested or env.get(to_launcher):
        return None
    message = f"the job has {format_count(requested, 'CPU')} per task ({of_job}), but this rank may use {machine.cpus}"
    return Check(f"CPUs of {info.launcher}'s tasks", message, f"export {to_launcher}=${of_job} before {info.launcher}")


def check_threads(env: Mapping[str, str], info: RankInfo, machine: Machine) -> Check | None:
    """A scheduler may set OMP_NUM_THREADS to all CPUs of the node, for each of its ranks (OpenPBS, start_exec.c)."""
    threads = read_number(env.get("OMP_NUM_THREADS", "").partition(",")[0])
    ranks = info.local_world_size or 1
    if threads is None or machine.cores is None or ranks == 1:
        return None
    fitting = max(1, machine.cores // ranks)
    if threads <= fitting:
        return None
    cores = format_count(machine.cores, "CPU")
    message = f"OMP_NUM_THREADS={threads} times {ranks} ranks on this node is more than its {cores}"
    return Check("threads", message, f"export OMP_NUM_THREADS={fitting}")


def check_memlock(machine: Machine) -> Check | None:
    """InfiniBand registers memory, which a limit of locked memory stops (`ibv_reg_mr: Cannot allocate memory`)."""
    if not machine.infiniband or machine.memlock is None or machine.memlock < 0:
        return None
    message = f"this host has InfiniBand, and processes may lock {machine.memlock // 1024} KiB of memory only"
    return Check("locked memory", message, "ulimit -l unlimited; ask the site for memlock in limits.conf", FAILED)


def describe_machine() -> Machine:
    """Describe this host as this process sees it. Cheap: `hpcddp env` runs it."""
    import resource

    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    memlock = -1 if limit == resource.RLIM_INFINITY else limit
    return Machine(len(os.sched_getaffinity(0)), os.cpu_count(), memlock, _has_infiniband())


def _has_infiniband() -> bool:
    try:
        return bool(os.listdir("/sys/class/infiniband"))
    except OSError:
        return False
