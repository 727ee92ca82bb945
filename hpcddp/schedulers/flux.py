"""Flux: its allocations are seen, without their hosts; hpcddp writes no job scripts for it."""

from __future__ import annotations

from hpcddp.schedulers.row import Scheduler, Variables

SCHEDULER = Scheduler(
    name="flux",
    title="Flux",
    order=60,
    variables=Variables(
        prefixes=("FLUX_",),
        job_id=("FLUX_JOB_ID", "FLUX_ENCLOSING_ID"),  # the second is of the instance around a shell
        of_job=("FLUX_JOB_ID", "FLUX_ENCLOSING_ID", "FLUX_URI"),
    ),
    launcher="flux",
)
