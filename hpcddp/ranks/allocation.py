"""The job that an environment shows. The schedulers' own modules read their variables: `hpcddp/schedulers/`."""

from __future__ import annotations

from hpcddp.record import TYPE_CHECKING
from hpcddp.schedulers.allocation import Allocation, read_named_file, read_nodefile
from hpcddp.schedulers.registry import all_schedulers, find_current_job, find_scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    FindAllocation = Callable[[], Allocation | None]

__all__ = ["Allocation", "find_allocation", "read_nodefile"]


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
    owner = next(scheduler.name for scheduler in all_schedulers() if scheduler.owns_bare_hostfile)
    return Allocation(owner, "", read_nodefile(nodefile), nodefile)
