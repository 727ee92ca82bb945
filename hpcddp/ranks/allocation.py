"""What the scheduler gave: which hosts, with how many slots each. Never a source of ranks.

Slots are places, not processes: `mpirun -n 1` in an allocation of 4 slots is one rank.
"""

from __future__ import annotations

from hpcddp.errors import LaunchError
from hpcddp.ranks.nodelist import expand_counts, expand_nodelist, is_address
from hpcddp.ranks.record import TYPE_CHECKING, Record
from hpcddp.units import read_number

if TYPE_CHECKING:
    from collections.abc import Mapping

_MOST_COMPONENTS = 128  # Slurm's MAX_HET_JOB_COMPS


class Allocation(Record):
    """One job. `hosts`: (name, slots) in the scheduler's order, each host once; None where they cannot be read here."""

    scheduler: str  # pbs, slurm, gridengine, lsf, pjm, flux
    job_id: str  # with the array index where there is one; "" if unknown
    hosts: tuple[tuple[str, int], ...] | None
    source: str  # variable or file that the hosts came from, "" without hosts
    interactive: bool = False

    @property
    def slots(self) -> int | None:
        """Slots on all hosts; None if the hosts are unknown."""
        return None if self.hosts is None else sum(n for _, n in self.hosts)


def find_allocation(env: Mapping[str, str], nodefile: str | None = None, *, live: bool = False) -> Allocation | None:
    """The innermost job this environment shows, or None. `nodefile` stands in for the file that the environment names.

    A file that the environment names and that cannot be read here gives hosts None; one that the caller names must be
    readable. With `live` (the environment is this process's own) PBS's file is also looked for where PBS keeps it.
    """
    if live and nodefile is None and env.get("PBS_JOBID") and not env.get("PBS_NODEFILE"):
        nodefile = _kept_by_pbs(env["PBS_JOBID"])
    for find in (_slurm, _pbs, _grid_engine, _lsf, _pjm, _flux):
        found = find(env, nodefile)
        if found is not None:
            return found
    if nodefile is not None:
        return Allocation("pbs", "", read_nodefile(nodefile), nodefile)
    return None


def read_nodefile(path: str) -> tuple[tuple[str, int], ...]:
    """Hosts and slots of a file with one host per line, or `host N`, `host slots=N`, `host:N`.

    PBS writes a host once per slot. It may come back later in the file, and be fully qualified in one line and short
    in another (both seen in OpenPBS 23.06): lines of one first label are one host. LaunchError if the file cannot be
    read or is empty.
    """
    lines = _lines(path)
    if lines is None:
        raise LaunchError(f"the node file {path} cannot be read", f"ls -l {path}")
    hosts = _count_hosts(lines, path)
    if not hosts:
        raise LaunchError(f"the node file {path} is empty", "ask for mpiprocs of 1 or more in the select statement")
    return hosts


def _lines(path: str) -> list[list[str]] | None:
    try:
        with open(path, encoding="utf-8") as file:
            return [words for line in file if (words := line.partition("#")[0].split())]
    except (OSError, UnicodeDecodeError):
        return None


def _count_hosts(lines: list[list[str]], path: str = "") -> tuple[tuple[str, int], ...]:
    """Hosts and slots. A second word that is no count is refused in a file that a person names (`path`); in a
    scheduler's own file it is something else of that scheduler, and the line is one slot."""
    counts: dict[str, int] = {}
    names: dict[str, str] = {}  # first label -> the name it first had
    for words in lines:
        name, _, count = words[0].partition(":") if words[0].count(":") == 1 else (words[0], "", "")
        count = count or (words[1].removeprefix("slots=") if len(words) > 1 else "1")
        name = names.setdefault(name.lower() if is_address(name) else name.partition(".")[0].lower(), name)
        slots = read_number(count)
        if slots is None and path:
            raise LaunchError(f"{path}: {' '.join(words)!r} does not say how many slots", "write: host slots=4")
        counts[name] = counts.get(name, 0) + (1 if slots is None else slots)
    return tuple(counts.items())


def _named_file(
    env: Mapping[str, str], variable: str, nodefile: str | None
) -> tuple[tuple[tuple[str, int], ...] | None, str]:
    """Hosts from the caller's file, else from the file that `variable` names, else None."""
    if nodefile is not None:
        return read_nodefile(nodefile), nodefile
    lines = _lines(env[variable]) if env.get(variable) else None
    return (None, "") if lines is None else (_count_hosts(lines), f"{variable} ({env[variable]})")


def _slurm(env: Mapping[str, str], _nodefile: str | None) -> Allocation | None:
    job = env.get("SLURM_JOB_ID") or env.get("SLURM_JOBID")
    if not job:
        return None
    # Heterogeneous jobs: SLURM_JOB_NODELIST is the first component's, the others stand in variables of their own.
    components = min(read_number(env.get("SLURM_HET_SIZE", "")) or 0, _MOST_COMPONENTS)
    groups = [f"_HET_GROUP_{i}" for i in range(components)] or [""]
    counts: dict[str, int] = {}
    source = ""
    for group in groups:
        variable = f"SLURM_JOB_NODELIST{group}"
        if variable not in env and not group:
            variable = "SLURM_NODELIST"
        if variable not in env:
            continue
        source = source or variable
        names = expand_nodelist(env[variable], variable)
        tasks = env.get(f"SLURM_TASKS_PER_NODE{group}", "")
        slots = expand_counts(tasks, f"SLURM_TASKS_PER_NODE{group}") if tasks else []
        if len(slots) != len(names):  # inside a step this is the step's, which may be smaller than the job
            slots = [1] * len(names)
        for name, count in zip(names, slots, strict=True):
            counts[name] = counts.get(name, 0) + count
    interactive = env.get("SLURM_STEP_ID") == "4294967290" or "SLURM_PTY_PORT" in env
    return Allocation("slurm", job, tuple(counts.items()) or None, source, interactive)


def _pbs(env: Mapping[str, str], nodefile: str | None) -> Allocation | None:
    if not any(name in env for name in ("PBS_JOBID", "PBS_NODEFILE", "PBS_ENVIRONMENT")):
        return None
    hosts, source = _named_file(env, "PBS_NODEFILE", nodefile)
    return Allocation("pbs", env.get("PBS_JOBID", ""), hosts, source, env.get("PBS_ENVIRONMENT") == "PBS_INTERACTIVE")


def _kept_by_pbs(job_id: str) -> str | None:
    """PBS's own copy of the node file, on every host of the job; tasks on the first host are not told where it is."""
    home = "/var/spool/pbs"
    for key, _, value in (words[0].partition("=") for words in _lines("/etc/pbs.conf") or []):
        home = value if key == "PBS_HOME" else home
    path = f"{home}/aux/{job_id}"
    return path if _lines(path) else None


def _grid_engine(env: Mapping[str, str], nodefile: str | None) -> Allocation | None:
    # SGE_ROOT alone is any machine where Grid Engine's commands work; the spool directory and the task id are a job's.
    if "JOB_ID" not in env or not ("SGE_TASK_ID" in env or "PE_HOSTFILE" in env or "SGE_JOB_SPOOL_DIR" in env):
        return None
    hosts, source = _named_file(env, "PE_HOSTFILE", nodefile)  # lines of: host slots queue processors
    task = env.get("SGE_TASK_ID", "undefined")
    job = env["JOB_ID"] + ("" if task == "undefined" else f".{task}")
    return Allocation("gridengine", job, hosts, source)


def _lsf(env: Mapping[str, str], nodefile: str | None) -> Allocation | None:
    if "LSB_JOBID" not in env:
        return None
    index = env.get("LSB_JOBINDEX", "0")
    job = env["LSB_JOBID"] + ("" if index in {"", "0"} else f"[{index}]")
    words = env.get("LSB_MCPU_HOSTS", "").split()  # host count host count …
    if nodefile is None and words and len(words) % 2 == 0:
        pairs = [words[i : i + 2] for i in range(0, len(words), 2)]
        return Allocation("lsf", job, _count_hosts(pairs), "LSB_MCPU_HOSTS")
    hosts, source = _named_file(env, "LSB_DJOB_HOSTFILE", nodefile)
    if hosts is None and env.get("LSB_HOSTS"):
        hosts, source = _count_hosts([[h] for h in env["LSB_HOSTS"].split()]), "LSB_HOSTS"
    return Allocation("lsf", job, hosts, source)


def _pjm(env: Mapping[str, str], nodefile: str | None) -> Allocation | None:
    if "PJM_JOBID" not in env:
        return None
    hosts, source = _named_file(env, "PJM_O_NODEINF", nodefile)
    return Allocation("pjm", env["PJM_JOBID"], hosts, source)


def _flux(env: Mapping[str, str], nodefile: str | None) -> Allocation | None:
    job = env.get("FLUX_JOB_ID") or env.get("FLUX_ENCLOSING_ID")
    if not job and "FLUX_URI" not in env:
        return None
    return Allocation("flux", job or "", None if nodefile is None else read_nodefile(nodefile), nodefile or "")
