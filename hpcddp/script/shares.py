"""What each rank gets of the batch and of the model: whether that works out for a number of nodes."""

from __future__ import annotations

from hpcddp.errors import RequestError
from hpcddp.parallelism import check_one_gpu, plan_split, read_parallel
from hpcddp.placeholders import OF_RANK, batch_numbers, find_placeholders, refuse_one_rank
from hpcddp.script.jobplan import SOME_COMMAND, JobPlan
from hpcddp.script.spec import JobSpec


def check_placeholders(plan: JobPlan) -> None:
    """RequestError for a placeholder of the command that no rank could fill, and for a number in place of one."""
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
    own = [name for name in find_placeholders(plan.command) if name in OF_RANK]
    if plan.own_ranks and own:
        raise RequestError(
            f"{{{own[0]}}} in the command: {plan.own_ranks} makes the ranks, and the command runs once per node",
            "leave it out",
        )
    joins = plan.world_size > 1 and not plan.spec.independent
    if joins and (plan.nodes > 1 or plan.own_ranks != SOME_COMMAND):  # else the program numbers its own ranks
        refuse_one_rank(plan.command, plan.own_ranks)


def plan_data_size(spec: JobSpec, nodes: int, ranks_per_node: int, gpus_per_rank: int) -> int:
    """How many ranks see different samples. RequestError for a split that the nodes and ranks do not allow."""
    if spec.parallel is None:
        return nodes * ranks_per_node
    asked = read_parallel(spec.parallel, spec.sources.get("parallel", "parallel"))
    if gpus_per_rank > 1:
        check_one_gpu(asked, gpus_per_rank)
    hosts = [f"node {node}" for node in range(nodes) for _ in range(ranks_per_node)]
    return plan_split(asked, hosts).data_size
