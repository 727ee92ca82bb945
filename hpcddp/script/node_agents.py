"""A command that makes its ranks itself, one process of it per node: torchrun, `accelerate launch`, or any other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpcddp.errors import RequestError
from hpcddp.ranks.launch_commands import NodeAgentCommand, find_node_agent, read_node_agent_options
from hpcddp.ranks.launchers import LAUNCHERS, NODE_AGENTS
from hpcddp.record import Record
from hpcddp.script.jobplan import SOME_COMMAND
from hpcddp.script.spec import JobSpec

_SPAWNS = "multiprocessing-distributed"  # of pytorch/examples' imagenet and its many copies


class RankMaker(Record):
    """The maker of each node's ranks, and the row of the launcher whose variables they get; "" for both if the command
    makes none."""

    maker: str = ""
    node_agent: str = ""


def plan_rank_maker(spec: JobSpec) -> tuple[JobSpec, RankMaker]:
    """The spec with the ranks per node that the command itself names, and what makes the ranks.

    RequestError if the command cannot be one of several, or contradicts the spec.
    """
    command = spec.command or ()
    found = find_node_agent(command)
    if spec.ranks == "each" or (found is None and spec.ranks is None and not _has_option(command)):
        return spec, RankMaker()
    if spec.launcher and LAUNCHERS[spec.launcher].is_node_agent:
        what = found[1].command if found else SOME_COMMAND
        what = f"{what} makes the ranks of each node, and launcher {spec.launcher} would start it once per rank"
        raise RequestError(what, f"leave out --launcher {spec.launcher}")
    if found is None:
        return spec, RankMaker(SOME_COMMAND, NODE_AGENTS[0])
    at, node_agent = found
    given = read_node_agent_options(command[at + len(node_agent.command.split()) :], node_agent)
    if (spec.nodes or 1) > 1:
        _refuse_options_of_all_nodes(node_agent, given)
    for option, ours in node_agent.typed.items():
        if option not in given:
            continue
        words, value = f"{node_agent.command} {option} {given[option]}", given[option]
        number = value if value.isdecimal() else "N"
        if ours == "--nodes" and value != str(spec.nodes or 1):
            raise RequestError(
                f"{words}, but the job has {spec.nodes or 1}", f"--nodes {number}, or leave out {option}"
            )
        if ours == "--ranks-per-node":
            spec = _with_ranks(spec, option, value, words)
    return spec, RankMaker(node_agent.command, node_agent.node_agent)


def _has_option(command: Sequence[str]) -> bool:
    return any(word.partition("=")[0].lstrip("-").replace("_", "-") == _SPAWNS for word in command if word[:2] == "--")


def _refuse_options_of_all_nodes(node_agent: NodeAgentCommand, given: Mapping[str, str]) -> None:
    """Refuse options that would be the same on each node, so that each would train alone: several node agents meet
    where the job script says. A number of processes would be that of each node, or of all."""
    for option in node_agent.rendezvous_options:
        if option in given:
            raise RequestError(
                f"{node_agent.command} {option} on several nodes: hpcddp gives each node's {node_agent.command} "
                "its node rank, its ranks and the rendezvous",
                f"leave out {option}",
            )


def _with_ranks(spec: JobSpec, option: str, value: str, words: str) -> JobSpec:
    if not value.isdecimal() or int(value) < 1:
        hint = f"leave out {option}: each GPU gets a rank, or as many as hpcddp's own --ranks-per-node R says"
        raise RequestError(f"{words}: the job has to know the number", hint)
    if spec.ranks_per_node not in (None, int(value)):
        what = f"{words}, but {spec.ranks_per_node} ranks per node are asked for"
        raise RequestError(what, f"leave out {option}, or the other")
    return spec._replace(ranks_per_node=int(value))
