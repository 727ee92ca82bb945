"""Variables of a launch that training frameworks read besides torch's own, so that their scripts run unchanged.

docs/frameworks.md says which framework reads which. Seen with accelerate 1.15, transformers 5.23, lightning 2.6,
deepspeed 0.19 and composer 0.32.
"""

from __future__ import annotations

from hpcddp.ranks.consistency import check_exported, check_node_rank
from hpcddp.ranks.launcher import HANDED_ON
from hpcddp.ranks.launchers import LAUNCHERS
from hpcddp.record import TYPE_CHECKING
from hpcddp.schedulers.allocation import same_host

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpcddp.ranks.launch import Launch
    from hpcddp.ranks.launcher import RankInfo


_LIGHTNING = ("PL_TRAINER_", "LT_")  # what Trainer and Fabric look for, each with the names of its arguments
#: All that `framework_variables` may set, and `node_agent_variables` beside what a node agent's row names.
FRAMEWORK_VARIABLES = (
    *("GROUP_RANK", "NODE_RANK", "TORCHELASTIC_RUN_ID", "PL_TRAINER_NUM_NODES", "PL_TRAINER_DEVICES"),
    *("LT_NUM_NODES", "LT_DEVICES", "ACCELERATE_USE_CPU"),
)


def framework_variables(env: Mapping[str, str], launch: Launch, *, gpus: int, cpu_only: bool) -> dict[str, str]:
    """Variables for the program of this rank of several; none that `env` has.

    `gpus` is the number of GPUs that the rank sees; `cpu_only`: it has no accelerator of any kind.
    """
    found: dict[str, str] = {}
    info, node_rank = launch.info, _node_rank(launch)
    if node_rank is not None:
        if LAUNCHERS[info.launcher].rank != LAUNCHERS["env"].rank:  # node agents may number the nodes as they come
            check_node_rank(env, node_rank, LAUNCHERS["env"])
        # torchrun's name of it, and the one that Composer insists on
        found |= {"GROUP_RANK": str(node_rank), "NODE_RANK": str(node_rank)}
    # Lightning then takes the place of this rank from RANK and WORLD_SIZE. Without it, it looks for Slurm's variables,
    # which mpirun's ranks share, and for mpi4py, which would call MPI_Init.
    found["TORCHELASTIC_RUN_ID"] = HANDED_ON + (env.get("HPCDDP_ATTEMPT", "") or "exec")
    found |= _lightning_size(info, gpus)
    if cpu_only:
        found["ACCELERATE_USE_CPU"] = "true"  # else Accelerate and HF's Trainer train W copies, without a word
    return {name: value for name, value in found.items() if name not in env}


def node_agent_variables(
    reads: Mapping[str, str], env: Mapping[str, str], info: RankInfo, nodes: int, ranks_per_node: int
) -> dict[str, str]:
    """Variables that a node agent `reads` if its options say nothing: all meet at rank 0's address, which `env` has.

    LaunchError where one of these variables is exported with another value: it would be the same on each node, or each
    node would train alone.
    """
    node = "0" if nodes == 1 else str(info.rank)
    check_node_rank(env, int(node), LAUNCHERS["env"])
    values = {
        "nodes": str(nodes),
        "node_rank": node,
        "ranks_per_node": str(ranks_per_node),
        "master_addr": env["MASTER_ADDR"],
        "master_port": env["MASTER_PORT"],
        "yes": "1",
        "unset": "",
    }
    decided = ("nodes", "ranks_per_node", *(("master_addr", "master_port", "unset") if nodes > 1 else ()))
    check_exported(env, {name: values[what] for name, what in reads.items() if what in decided})
    found = {name: values[what] for name, what in reads.items() if what != "unset"}
    found |= {"NODE_RANK": node, "GROUP_RANK": node}
    return {name: value for name, value in found.items() if name not in env}


def check_node_agents(env: Mapping[str, str], node_agent: str, nodes: int) -> None:
    """Check that no exported variable makes each of several node agents train alone, or wait elsewhere: for a job
    script that starts them, as for a node agent that is the command itself. LaunchError."""
    if nodes > 1 and node_agent in LAUNCHERS:
        check_exported(env, {name: "" for name, what in LAUNCHERS[node_agent].reads.items() if what == "unset"})


def _node_rank(launch: Launch) -> int | None:
    """The node's number, by the launcher, else by the job's list of hosts where the launch uses all of them."""
    info = launch.info
    if info.node_rank is not None or info.local_world_size is None or launch.allocation is None or not launch.hostname:
        return info.node_rank
    hosts = launch.allocation.hosts or ()
    places = [place for place, (host, _) in enumerate(hosts) if same_host(host, launch.hostname)]
    return places[0] if len(places) == 1 and info.local_world_size * len(hosts) == info.world_size else None


def _lightning_size(info: RankInfo, gpus: int) -> dict[str, str]:
    """Lightning's world: devices x nodes. Nothing where nodes' numbers of ranks differ, or where ranks share a GPU."""
    nodes, local = count_nodes(info), info.local_world_size
    if nodes is None or local is None or 0 < gpus < local:
        return {}
    # with LT_CLI_USED beside them, fabric.launch() would be refused
    return {f"{who}NUM_NODES": str(nodes) for who in _LIGHTNING} | {f"{who}DEVICES": str(local) for who in _LIGHTNING}


def count_nodes(info: RankInfo) -> int | None:
    """The nodes of a launch with as many ranks on each of them; None where they differ, or it is not known."""
    local = info.local_world_size
    if local is None:
        return info.num_nodes
    nodes, rest = divmod(info.world_size, local)
    return nodes if not rest and info.num_nodes in (None, nodes) else None
