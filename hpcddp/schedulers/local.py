"""No scheduler: the ranks run on this machine, here and now. hpcddp/login/background.py starts its jobs."""

from __future__ import annotations

from hpcddp.schedulers.row import Scheduler, Variables

SCHEDULER = Scheduler(
    name="local",
    title="this machine",
    generic_site="local",
    this_machine=True,
    variables=Variables(job_id=("HPCDDP_JOB_ID",), of_job=("HPCDDP_JOB_ID",)),
)
