"""The plan as JSON values: for people, and in the folder of a run whose job waits."""

from __future__ import annotations

from typing import Any

from hpcddp.runs.jsonfile import SCHEMA
from hpcddp.script.plan import JobPlan


def plan_record(plan: JobPlan) -> dict[str, Any]:
    """The whole decision. A job that runs records in its place what its script says."""
    return {
        "schema": SCHEMA,
        "name": plan.name,
        "site": plan.site.name,
        "scheduler": plan.site.scheduler,
        "launcher": plan.launcher,
        "nodes": plan.nodes,
        "ranks_per_node": plan.ranks_per_node,
        "world_size": plan.world_size,
        "gpus_per_node": plan.gpus_per_node,
        "cpus_per_rank": plan.cpus_per_rank,
        "threads_per_rank": plan.threads_per_rank,
        "walltime_s": plan.walltime_s,
        "queue": plan.queue or None,
        "account": plan.account or None,
        "global_batch": plan.global_batch,
        "command": list(plan.command),
        "run_dir": plan.run_dir,
        "created_by": plan.planned_by.created_by,
        **({"gpus_per_rank": plan.gpus_per_rank} if plan.gpus_per_rank > 1 else {}),
        **({"parallel": plan.spec.parallel} if plan.spec.parallel else {}),
    }
