"""How a job goes on without what it has lost, as the request asks: how often, and on how many nodes."""

from __future__ import annotations

from typing import Any

from hpcddp.errors import HpcddpError, RequestError
from hpcddp.ranks.launchers import JOB_LAUNCHERS
from hpcddp.schedulers.registry import find_scheduler
from hpcddp.script.jobplan import JobPlan
from hpcddp.script.shares import check_placeholders, plan_data_size
from hpcddp.script.spec import JobSpec
from hpcddp.supervisor.order import Recover
from hpcddp.units import format_count

RECOVERY_KEYS = ("max_restarts", "min_nodes", "spares", "stall_limit", "health_check")
_USUAL_LIMIT_S = 60
_FIELDS = (
    *("nodes", "processes_per_node", "cpus_per_process", "ranks_per_node", "hostfile", "exported", "exported_always"),
    *("exported_if_set", "bind", "oversubscribe", "launcher_options"),
)


def check_asked_recovery(spec: JobSpec, scheduler: str) -> None:
    """RequestError for keys that say nothing together."""
    if spec.max_restarts is None:
        for key in RECOVERY_KEYS:
            if spec.asks_for(key):
                where = spec.sources.get(key, key)
                raise RequestError(f"{where}: nothing is started again without max_restarts", "--set max_restarts=3")
        return
    if spec.independent:
        raise RequestError(
            "max_restarts starts all ranks again when one is lost, and those of an independent job do not wait for it",
            "leave out max_restarts, or independent",
        )
    nodes = spec.nodes or 1
    if spec.min_nodes is not None and spec.min_nodes > nodes:
        raise RequestError(
            f"min_nodes {spec.min_nodes}: the job has {format_count(nodes, 'node')}", f"--set min_nodes={nodes}"
        )
    if spec.spares and find_scheduler(scheduler).this_machine:
        raise RequestError(f"spares {spec.spares}: this machine has no other nodes", "leave it out")


def plan_recovery(plan: JobPlan) -> Recover | None:
    """None if nothing is started again. RequestError if the request works out on no smaller number of nodes that it
    allows itself."""
    spec = plan.spec
    if not spec.max_restarts:
        return None
    if plan.outer and not plan.outer.takes_hosts:
        others = [name for name in plan.outer.calls if name in JOB_LAUNCHERS]
        raise RequestError(
            f"max_restarts: {plan.outer.name} cannot be told to leave out a lost node",
            f"--launcher {' or '.join(others)}, or leave out max_restarts",
        )
    fits = tuple(nodes for nodes in range(_least(plan), plan.nodes + 1) if _works_out(plan, nodes))
    if spec.min_nodes is not None and spec.min_nodes not in fits:
        numbers = " or ".join(map(str, fits))
        raise RequestError(
            f"min_nodes {spec.min_nodes}: the request works out on {numbers} nodes only", f"--set min_nodes={fits[0]}"
        )
    return Recover(
        restarts=spec.max_restarts,
        fits=fits,
        spares=spec.spares or 0,
        limit_s=spec.stall_limit_s or _USUAL_LIMIT_S,
        health=spec.health_check or "",
        request=_as_told(plan) if plan.outer_launcher else {},
        stage=_as_told(plan.per_node()) if plan.outer_launcher and spec.stage_in else {},
    )


def remark_recovery(plan: JobPlan) -> list[str]:
    """What the job's owner should know of it."""
    recover = plan_recovery(plan)
    if recover is None or plan.nodes == 1:
        return []
    numbers = " or ".join(map(str, recover.fits))
    spare = f", and {format_count(recover.spares, 'spare node')}" if recover.spares else ""
    remarks = [f"started again up to {format_count(recover.restarts, 'time')}, on {numbers} nodes{spare}"]
    if recover.fits[0] < plan.nodes and plan.global_batch and not plan.spec.max_micro_batch:
        most = -(-plan.global_batch * plan.nodes // (plan.data_size * recover.fits[0]))
        remarks.append(
            f"on {format_count(recover.fits[0], 'node')} a rank takes {most} samples at once: max_micro_batch bounds it"
        )
    return remarks


def _least(plan: JobPlan) -> int:
    return plan.spec.min_nodes or (plan.nodes + 1) // 2


def _works_out(plan: JobPlan, nodes: int) -> bool:
    """Whether batch, split and placeholders do, on so many nodes."""
    try:
        size = plan_data_size(plan.spec, nodes, plan.ranks_per_node, plan.gpus_per_rank)
        check_placeholders(plan._replace(nodes=nodes, data_size=size))
    except HpcddpError:
        return False
    return plan.global_batch is None or plan.global_batch >= size


def _as_told(plan: JobPlan) -> dict[str, Any]:
    """The plan's LaunchRequest, as JSON values; what is as usual is left out."""
    from hpcddp.ranks.launch_line import LaunchRequest

    usual = LaunchRequest._field_defaults
    told = {name: getattr(plan, name) for name in _FIELDS}
    return {name: value for name, value in told.items() if name not in usual or value != usual[name]}
