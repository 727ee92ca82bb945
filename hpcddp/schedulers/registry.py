"""Finds the schedulers' rows by the files of this folder, so that adding a scheduler is adding its module."""

from __future__ import annotations

import os
import sys

from hpcddp.errors import SiteError, nearest
from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.schedulers.allocation import Allocation, read_named_file, read_nodefile
from hpcddp.schedulers.job_id import JobId

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpcddp.schedulers.row import Scheduler

# The modules of this folder that all schedulers share.
SHARED = frozenset({"__init__", "allocation", "directive_rules", "job_id", "registry", "row", "run"})
_loaded: list[Scheduler] = []


def scheduler_names() -> tuple[str, ...]:
    """The names of all schedulers, sorted. Loads none of them."""
    stems = (file[:-3] for file in os.listdir(os.path.dirname(__file__)) if file.endswith(".py"))
    return tuple(sorted(stem for stem in stems if stem not in SHARED))


def find_scheduler(name: str) -> Scheduler:
    """The row of one scheduler; only its module is loaded. SiteError if there is none."""
    module = f"hpcddp.schedulers.{name}"
    if module not in sys.modules:
        names = scheduler_names()
        if name not in names:
            known = [row.name for row in scripted_schedulers()]
            raise SiteError(f"scheduler {name!r} is not known{nearest(name, known)}", f"one of: {', '.join(known)}")
    __import__(module)  # also where it is there: another thread may be about to load it
    row: Scheduler = sys.modules[module].SCHEDULER
    return row


def all_schedulers() -> list[Scheduler]:
    """Every row; where several could be meant, in the order in which they are asked."""
    if not _loaded:
        _loaded[:] = sorted(map(find_scheduler, scheduler_names()), key=lambda row: (row.order, row.name))
    return _loaded


class CurrentJob(Record):
    """The job around a process. `scheduler`: its row's name. `id`: means this job alone to the scheduler's commands, ""
    if it is not known. `name`: the job's part of its attempts' names. `array_index`: "" without an array."""

    scheduler: str
    id: str
    name: str
    array_index: str = ""


def find_current_job(env: Mapping[str, str], scheduler: str = "") -> CurrentJob | None:
    """The job of a process with this environment, which may show several: the first in the rows' order, or the one of
    this scheduler. None outside of a job."""
    for row in [find_scheduler(scheduler)] if scheduler else all_schedulers():
        if any(env.get(name) for name in row.variables.of_job or row.variables.job_id):
            return _read_job(row, env)
    return None


def _read_job(row: Scheduler, env: Mapping[str, str]) -> CurrentJob:
    says, first = row.variables, row.directives.array_first
    job = next((env[name] for name in says.job_id if env.get(name)), "")
    indices = (env[name] for name in says.array_index if env.get(name, "").isdecimal())
    index = next((index for index in indices if int(index) >= first), "")
    if not index or not job.isdecimal():  # PBS has the index in the id itself
        return CurrentJob(row.name, job, JobId(job, job).name, index)
    array = env.get(says.array_id) or job
    of_array = JobId(array, array).at(index, row.commands.of_index)
    # the last job of a Slurm array has the array's own id, by which commands mean all of its jobs
    return CurrentJob(row.name, str(of_array) if job == array else job, of_array.name, index)


def find_allocation(env: Mapping[str, str], nodefile: str | None = None, *, live: bool = False) -> Allocation | None:
    """The innermost job that this environment shows, or None. `nodefile` replaces the file that the environment names.

    A file that the environment names and that cannot be read here gives hosts None; one that the caller names must be
    readable. With `live` (the environment is this process's own) a scheduler's own copy of that file is looked for too.
    """
    job = find_current_job(env)
    row = find_scheduler(job.scheduler) if job is not None else None
    if job is not None and row is not None and not row.this_machine:
        nodefile = nodefile or (row.find_hostfile_copy(env) if live else None)
        says = row.variables
        found = row.find_hosts(env, nodefile) if row.find_hosts else read_named_file(env, says.nodefile, nodefile)
        is_shell = any(value in env.get(name, "") for name, value in says.interactive.items() if name in env)
        return Allocation(job.scheduler, job.id, *found, is_shell)
    if nodefile is None:
        return None
    owner = next(row.name for row in all_schedulers() if row.variables.nodefile)
    return Allocation(owner, "", read_nodefile(nodefile), nodefile)


def list_hosts(env: Mapping[str, str]) -> tuple[str, ...]:
    """The hosts of the job, as its scheduler names them; empty where none are known."""
    allocation = find_allocation(env)
    return tuple(name for name, _ in (allocation.hosts or ())) if allocation is not None else ()


def job_variables(env: Mapping[str, str]) -> list[str]:
    """The variables that say which job a process with this environment belongs to; outside of a job all that could.

    A job that a rank submits inherits the rank's environment, but for these.
    """
    rows = [row.variables for row in all_schedulers()]
    # one that no prefix of the scheduler's covers, such as JOB_ID, may be a program's own
    could = [name for row in rows for name in row.job_id if name not in row.prefixes]
    return [name for row in rows for name in row.job_id if name in env] or could


def submit_commands() -> list[tuple[str, Scheduler]]:
    """The submit commands that show their scheduler where they are on PATH, in the order in which they are looked for.

    Those that are recognised by their `--version` go first: it is surer than a name.
    """
    found = [row for row in scripted_schedulers() if row.commands.submit and row.commands.identified]
    return [(row.commands.submit[0], row) for row in sorted(found, key=lambda row: row.commands.version == "")]


def refused_lines(word: str) -> str:
    """First lines with which text is no job script to any scheduler; `word` says why there is none."""
    return "".join(
        f"{row.directives.refused.format(word)}\n" for row in scripted_schedulers() if row.directives.refused
    )


def scripted_schedulers() -> list[Scheduler]:
    """List the schedulers that hpcddp writes job scripts for."""
    return [row for row in all_schedulers() if row.generic_site]
