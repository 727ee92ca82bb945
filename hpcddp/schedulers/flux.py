"""Flux: its allocations are seen, without their hosts; hpcddp writes no job scripts for it."""

from __future__ import annotations

from hpcddp.record import TYPE_CHECKING
from hpcddp.schedulers.allocation import Allocation, read_nodefile
from hpcddp.schedulers.row import Scheduler, Variables

if TYPE_CHECKING:
    from collections.abc import Mapping


def find_job(env: Mapping[str, str], nodefile: str | None) -> Allocation | None:
    """The job, or the instance around a shell, by Flux's variables."""
    job = env.get("FLUX_JOB_ID") or env.get("FLUX_ENCLOSING_ID")
    if not job and "FLUX_URI" not in env:
        return None
    return Allocation("flux", job or "", None if nodefile is None else read_nodefile(nodefile), nodefile or "")


SCHEDULER = Scheduler(
    name="flux",
    title="Flux",
    order=60,
    variables=Variables(prefixes=("FLUX_",), job_id="FLUX_JOB_ID"),
    find_job=find_job,
    launcher="flux",
)
