"""PJM, Fujitsu's scheduler: its allocations are read; hpcddp writes no job scripts for it."""

from __future__ import annotations

from hpcddp.record import TYPE_CHECKING
from hpcddp.schedulers.allocation import Allocation, read_named_file
from hpcddp.schedulers.row import Scheduler, Variables

if TYPE_CHECKING:
    from collections.abc import Mapping


def find_job(env: Mapping[str, str], nodefile: str | None) -> Allocation | None:
    """The job by PJM's variables."""
    if "PJM_JOBID" not in env:
        return None
    hosts, source = read_named_file(env, "PJM_O_NODEINF", nodefile)
    return Allocation("pjm", env["PJM_JOBID"], hosts, source)


SCHEDULER = Scheduler(
    name="pjm",
    title="PJM",
    order=50,
    variables=Variables(prefixes=("PJM_",), job_id="PJM_JOBID"),
    find_job=find_job,
)
