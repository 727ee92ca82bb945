"""The environment that a new job may see of the one that submits it: none of that job's own variables."""

from __future__ import annotations

from collections.abc import Mapping

from hpcddp.ranks.frameworks import FRAMEWORK_VARIABLES
from hpcddp.ranks.launchers import LAUNCHERS
from hpcddp.schedulers.registry import all_schedulers, find_current_job

# hpcddp's own that a person sets; all others are those of a job or of a rank.
_SETTINGS = ("HPCDDP_SITE", "HPCDDP_INTERFACE", "HPCDDP_LOG_TO", "HPCDDP_WATCHDOG", "HPCDDP_PROGRESS")
# What schedulers and job scripts set beside the variables with their names in them.
_OF_JOBS = (
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "GPU_DEVICE_ORDINAL"),
    *("OMP_NUM_THREADS", "NCPUS", "ENVIRONMENT", "TMPDIR", "JOB_NAME", "JOB_SCRIPT", "QUEUE", "RESTARTED", "NQUEUES"),
)


def clean_environment(env: Mapping[str, str]) -> dict[str, str]:
    """`env` itself outside of a job; in one, what is left without that job."""
    if find_current_job(env) is None and "HPCDDP_ATTEMPT" not in env:
        return dict(env)
    schedulers = all_schedulers()
    kept = {*_SETTINGS, *(name for row in schedulers for name in row.variables.settings)}
    prefixes = (
        "HPCDDP_",
        *(prefix for row in schedulers for prefix in row.variables.prefixes),
        *(prefix for row in LAUNCHERS.values() for prefix in row.prefixes),
    )
    gone = {name for name in env if name.startswith(prefixes) and name not in kept}
    gone.update(FRAMEWORK_VARIABLES, *(row.all_reads for row in LAUNCHERS.values()))
    return {name: value for name, value in env.items() if name not in gone and name not in _OF_JOBS}
