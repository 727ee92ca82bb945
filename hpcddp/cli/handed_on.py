"""What `hpcddp exec` hands on to the command beside torch's own variables: variables, and values for placeholders."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hpcddp import guard
from hpcddp.errors import LaunchError, RequestError
from hpcddp.record import Record

TYPE_CHECKING = False  # see cli/exec.py
if TYPE_CHECKING:
    from hpcddp.ranks.launch import Launch
    from hpcddp.ranks.rankinfo import RankInfo


class ExecOptions(Record):
    """What the options of `hpcddp exec` say: for placeholders the batch; `nodes` and `ranks_per_node` where the command
    makes the ranks of a node itself, else 0; how many GPUs the job has on each node."""

    nodes: int = 0
    ranks_per_node: int = 0
    global_batch: int | None = None
    max_micro_batch: int | None = None
    gpus_per_node: int = 0


NO_OPTIONS = ExecOptions()


def split_options(words: list[str]) -> dict[str, str] | None:
    """The options where each is a whole name and its value, as in a job script; None for other words.

    Without argparse, which would be a tenth of exec's time on every rank."""
    names = [word.removeprefix("--").replace("-", "_") for word in words[::2]]
    plain = len(words) % 2 == 0 and all(word.startswith("--") for word in words[::2])
    return dict(zip(names, words[1::2], strict=True)) if plain and set(names) <= set(ExecOptions._fields) else None


def read_options(texts: Mapping[str, str | None]) -> ExecOptions:
    """The options as numbers. RequestError for one that is none, or for half of a pair."""
    from hpcddp.units import parse_count

    given = {name: parse_count(text, f"--{name.replace('_', '-')}") for name, text in texts.items() if text is not None}
    if ("nodes" in given) != ("ranks_per_node" in given):
        raise RequestError("--nodes and --ranks-per-node belong together", "--nodes N --ranks-per-node R")
    return ExecOptions(**given)


def launch_environment(env: Mapping[str, str], options: ExecOptions) -> Mapping[str, str]:
    """The environment that says which rank this process is. A job of one node, whose command makes the ranks, has no
    launcher: its script starts the command."""
    return {**env, "HPCDDP_LAUNCHER": "none"} if options.nodes == 1 else env


def check_gpus(command: list[str], env: Mapping[str, str], info: RankInfo, hostname: str, each: int) -> dict[str, str]:
    """The variable by which the program knows that each node has GPUs; none where it is to train on CPUs.

    LaunchError where it starts Python or ranks that could find no GPU, and would train on CPUs without a word. Other
    commands may start Python, where the guard looks, or only look at the job, as `hostname` and `hpcddp env` do.
    """
    from hpcddp.ranks.device import GPUS_PER_NODE, asks_for_cpu, no_gpu, why_no_accelerator

    if not each or asks_for_cpu(command, env):
        return {}
    from hpcddp.ranks.launch_commands import starts_python_or_ranks

    if starts_python_or_ranks(command) and (why := why_no_accelerator(env)):
        raise no_gpu(f"rank {info.rank} on {hostname} sees none", each, why)
    return {GPUS_PER_NODE: str(each)}


def further_variables(
    command: list[str], env: Mapping[str, str], launch: Launch, options: ExecOptions
) -> dict[str, str]:
    """What frameworks read, or the agent of this node, and the guard against ranks that never meet."""
    from hpcddp.ranks.device import GPUS_PER_NODE
    from hpcddp.ranks.frameworks import agent_variables, framework_variables

    info = launch.info
    if options.nodes:
        _check_one_per_node(info, options.nodes)
        from hpcddp.ranks.launch_commands import find_agent
        from hpcddp.ranks.launchers import AGENTS, LAUNCHERS

        found = find_agent(command)
        agent, reads = (found[1].agent, found[1].reads) if found else (AGENTS[0], LAUNCHERS[AGENTS[0]].reads)
        # WORLD_SIZE counts nodes here; the ranks that an agent makes get one of their own, and these marks
        watched = {}
        if found:
            ranks = str(options.nodes * (options.ranks_per_node or 1))
            watched = _guard(env) | {guard.RANK_MARKS: " ".join(LAUNCHERS[agent].marks), guard.AGENT_RANKS: ranks}
        return agent_variables(reads, env, info, options.nodes, options.ranks_per_node) | watched
    if info.world_size == 1:
        return _guard(env) if GPUS_PER_NODE in env else {}
    from hpcddp.ranks.device import count_gpus, why_no_accelerator

    gpus = count_gpus(env)
    return framework_variables(env, launch, gpus=gpus, cpu_only=bool(why_no_accelerator(env))) | _guard(env)


def _guard(env: Mapping[str, str]) -> dict[str, str]:
    from hpcddp.ranks.launchers import AGENTS, LAUNCHERS

    found = {"PYTHONPATH": os.pathsep.join(filter(None, (*guard.__path__, env.get("PYTHONPATH", ""))))}
    agent = next((row for row in map(LAUNCHERS.__getitem__, AGENTS) if row.agent_store and row.restarts), None)
    if agent is not None:
        names = (agent.name, agent.marks[0], agent.num_nodes, agent.agent_store, agent.restarts)
        found[guard.AGENT_NAMES] = " ".join(names)
    return found


def _check_one_per_node(info: RankInfo, nodes: int) -> None:
    if info.world_size != nodes or info.local_world_size not in (None, 1):
        raise LaunchError(
            f"the command makes the ranks of each of {nodes} nodes, but {info.launcher} started it {info.world_size}"
            f" times ({info.local_world_size or '?'} on this node)",
            "start it once per node, or use a script of `hpcddp render`",
        )


def fill_command(command: list[str], env: Mapping[str, str], info: RankInfo, options: ExecOptions) -> list[str]:
    """The command with this rank's values for its placeholders. RequestError as of `refuse_one_rank`."""
    joins = info.world_size > 1 and not env.get("HPCDDP_INDEPENDENT")
    if joins and any("rank" in word for word in command):
        from hpcddp.placeholders import refuse_one_rank

        refuse_one_rank(command, "the command" if options.nodes else "")
    if not any("{" in word for word in command):
        return command
    from hpcddp.placeholders import batch_numbers, fill_placeholders
    from hpcddp.ranks.frameworks import count_nodes

    world_size = options.nodes * options.ranks_per_node or info.world_size
    values: dict[str, object] = {
        "rank": None if options.nodes else info.rank,
        "local_rank": None if options.nodes else info.local_rank,
        "world_size": world_size,
        "local_world_size": options.ranks_per_node or info.local_world_size,
        "nodes": options.nodes or count_nodes(info),
        "node_rank": env.get("GROUP_RANK"),
        "run_dir": env.get("HPCDDP_RUN_DIR"),
    }
    batch = batch_numbers(command, world_size, options.global_batch, options.max_micro_batch)
    return fill_placeholders(command, values | batch)
