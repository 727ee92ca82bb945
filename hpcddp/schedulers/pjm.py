"""PJM, Fujitsu's scheduler: its allocations are read; hpcddp writes no job scripts for it."""

from __future__ import annotations

from hpcddp.schedulers.row import Scheduler, Variables

SCHEDULER = Scheduler(
    name="pjm",
    title="PJM",
    order=50,
    variables=Variables(prefixes=("PJM_",), job_id=("PJM_JOBID",), nodefile="PJM_O_NODEINF"),
)
