"""How a job resumes after a lost node: how often, and on how many nodes."""

from __future__ import annotations

from hpcddp.errors import HpcddpError, RequestError
from hpcddp.parallelism import check_one_gpu, plan_split, read_parallel
from hpcddp.ranks.launchers import JOB_LAUNCHERS
from hpcddp.schedulers.registry import find_scheduler
from hpcddp.script.jobplan import JobPlan
from hpcddp.script.spec import JobSpec
from hpcddp.sweep import OF_RANK, batch_numbers, find_placeholders
from hpcddp.units import format_count


def check_placeholders(plan: JobPlan) -> None:
    """RequestError for a placeholder of the command that no rank could fill."""
    if plan.spec.max_micro_batch and not plan.global_batch:
        what = f"max_micro_batch {plan.spec.max_micro_batch} without global_batch: it bounds the parts of that"
        raise RequestError(what, "--global-batch 256")
    numbers = batch_numbers(plan.command, plan.world_size, plan.global_batch, plan.spec.max_micro_batch)
    if numbers.keys() - {"global_batch"} and plan.data_size < plan.world_size:
        raise RequestError(
            f"the command takes a rank's share of the batch, for each of {plan.world_size} ranks alike, but parallel"
            f" {plan.spec.parallel} has {plan.data_size} data ranks",
            "leave parallel out where the program splits its model itself; hpcddp.runtime deals the batch by itself",
        )
    of_rank = [name for name in find_placeholders(plan.command) if name in OF_RANK]
    if plan.rank_maker and of_rank:
        what = f"{{{of_rank[0]}}} in the command: {plan.rank_maker} makes the ranks, and the command runs once per node"
        raise RequestError(what, "leave it out")


def plan_data_size(spec: JobSpec, nodes: int, ranks_per_node: int, gpus_per_rank: int) -> int:
    """How many ranks see different samples. RequestError for a split that the nodes and ranks do not allow."""
    if spec.parallel is None:
        return nodes * ranks_per_node
    parallel = read_parallel(spec.parallel, spec.sources.get("parallel", "parallel"))
    if gpus_per_rank > 1:
        check_one_gpu(parallel, gpus_per_rank)
    hosts = [f"node {node}" for node in range(nodes) for _ in range(ranks_per_node)]
    return plan_split(parallel, hosts).data_size


RECOVERY_KEYS = ("max_restarts", "min_nodes", "spares", "stall_limit")


def check_recovery_keys(spec: JobSpec, scheduler: str) -> None:
    """RequestError for keys that have no effect together."""
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
        what = f"min_nodes {spec.min_nodes}: the job has {format_count(nodes, 'node')}"
        raise RequestError(what, f"--set min_nodes={nodes}")
    if spec.spares and find_scheduler(scheduler).this_machine:
        raise RequestError(f"spares {spec.spares}: this machine has no other nodes", "leave it out")


def plan_fewer_nodes(plan: JobPlan) -> tuple[int, ...]:
    """The smaller numbers of nodes on which the ranks may be started again. RequestError if the request works out on
    no smaller number of nodes that it allows itself."""
    spec = plan.spec
    if not spec.max_restarts:
        return ()
    if plan.outer and not plan.outer.hosts:
        others = [name for name in plan.outer.calls if name in JOB_LAUNCHERS]
        what = f"max_restarts: {plan.outer.name} cannot be told to leave out a lost node"
        raise RequestError(what, f"--launcher {' or '.join(others)}, or leave out max_restarts")
    fewer = tuple(
        nodes for nodes in range(spec.min_nodes or (plan.nodes + 1) // 2, plan.nodes) if _works_out(plan, nodes)
    )
    if spec.min_nodes is not None and spec.min_nodes not in (*fewer, plan.nodes):
        numbers = " or ".join(map(str, (*fewer, plan.nodes)))
        what = f"min_nodes {spec.min_nodes}: the request works out on {numbers} nodes only"
        raise RequestError(what, f"--set min_nodes={(*fewer, plan.nodes)[0]}")
    return fewer


def remark_recovery(plan: JobPlan) -> str | None:
    restarts, spares = plan.spec.max_restarts, plan.spec.spares
    if not restarts or plan.nodes == 1:
        return None
    numbers = " or ".join(map(str, (*plan.fewer_nodes, plan.nodes)))
    spare = f", and {format_count(spares, 'spare node')}" if spares else ""
    return f"started again up to {format_count(restarts, 'time')}, on {numbers} nodes{spare}"


def _works_out(plan: JobPlan, nodes: int) -> bool:
    """Batch, split and placeholders are possible on so many nodes."""
    try:
        size = plan_data_size(plan.spec, nodes, plan.ranks_per_node, plan.gpus_per_rank)
        check_placeholders(plan._replace(nodes=nodes, data_size=size))
    except HpcddpError:
        return False
    return True  # a global batch that is enough for more nodes is so for fewer
