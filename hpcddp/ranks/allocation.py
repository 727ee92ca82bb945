"""The job that an environment shows. The schedulers' own modules read their variables: `hpcddp/schedulers/`."""

from __future__ import annotations

from hpcddp.record import TYPE_CHECKING
from hpcddp.schedulers.allocation import Allocation, read_nodefile
from hpcddp.schedulers.registry import all_schedulers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    FindAllocation = Callable[[], Allocation | None]

__all__ = ["Allocation", "find_allocation", "read_nodefile"]


def find_allocation(env: Mapping[str, str], nodefile: str | None = None, *, live: bool = False) -> Allocation | None:
    """The innermost job that this environment shows, or None. `nodefile` replaces the file that the environment names.

    A file that the environment names and that cannot be read here gives hosts None; one that the caller names must be
    readable. With `live` (the environment is this process's own) a scheduler's own copy of that file is looked for too.
    """
    for scheduler in all_schedulers():
        found = scheduler.find_job(env, nodefile)
        if found is None:
            continue
        kept = scheduler.find_kept_hostfile(env) if live and nodefile is None else None
        return scheduler.find_job(env, kept) if kept else found
    if nodefile is None:
        return None
    owner = next(scheduler.name for scheduler in all_schedulers() if scheduler.owns_bare_hostfile)
    return Allocation(owner, "", read_nodefile(nodefile), nodefile)
