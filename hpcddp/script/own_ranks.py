"""A command that makes its ranks itself, one process of it per node: torchrun, `accelerate launch`, or any other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpcddp.errors import RequestError
from hpcddp.ranks.launch_commands import AgentCommand, find_agent
from hpcddp.ranks.launchers import AGENTS, LAUNCHERS
from hpcddp.record import Record
from hpcddp.script.jobplan import SOME_COMMAND
from hpcddp.script.spec import JobSpec

_SPAWNS = "--multiprocessing-distributed"  # of pytorch/examples' imagenet and its many copies


class OwnRanks(Record):
    """What makes the ranks of each node, and the row of the launcher that they are told their place by; "" for both if
    the command makes none."""

    maker: str = ""
    agent: str = ""


def plan_own_ranks(spec: JobSpec) -> tuple[JobSpec, OwnRanks]:
    """The spec with the ranks per node that the command itself names, and what makes the ranks.

    RequestError if the command cannot be one of several, or contradicts the spec.
    """
    command = spec.command or ()
    found = find_agent(command)
    if spec.ranks == "each" or (found is None and spec.ranks is None and _SPAWNS not in command):
        return spec, OwnRanks()
    if spec.launcher and LAUNCHERS[spec.launcher].is_agent:
        what = found[1].command if found else SOME_COMMAND
        raise RequestError(
            f"{what} makes the ranks of each node, and launcher {spec.launcher} would start it once per rank",
            f"leave out --launcher {spec.launcher}",
        )
    if found is None:
        return spec, OwnRanks(SOME_COMMAND, AGENTS[0])
    at, agent = found
    given = _options(command[at:])
    if (spec.nodes or 1) > 1:
        _refuse_meeting(agent, given)
    for option, ours in agent.typed.items():
        value = given.get(option, "")
        if value.isdecimal() and ours == "--nodes":
            _check_nodes(spec.nodes or 1, int(value), f"{agent.command} {option} {value}")
        elif value.isdecimal() and ours == "--ranks-per-node":
            if spec.ranks_per_node not in (None, int(value)):
                raise RequestError(
                    f"{agent.command} {option} {value}, but {spec.ranks_per_node} ranks per node are asked for",
                    f"leave out {option}, or the other",
                )
            spec = spec._replace(ranks_per_node=int(value))
    return spec, OwnRanks(agent.command, agent.agent)


def _options(words: Sequence[str]) -> Mapping[str, str]:
    """The long options up to the training script, with `-` for `_`, and their values."""
    given: dict[str, str] = {}
    for i, word in enumerate(words):
        if word.endswith(".py"):
            break
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            given[name.replace("_", "-")] = value if equals else next(iter(words[i + 1 : i + 2]), "")
    return given


def _refuse_meeting(agent: AgentCommand, given: Mapping[str, str]) -> None:
    """Several agents meet where the job script says, unless their own options say otherwise: those would be the same on
    each node, or each node would train alone."""
    for option in agent.meeting:
        if option in given:
            raise RequestError(
                f"{agent.command} {option} on several nodes: hpcddp tells each node's {agent.command} its number and"
                " where they meet",
                f"leave out {option}",
            )


def _check_nodes(nodes: int, value: int, said: str) -> None:
    if value != nodes:
        raise RequestError(f"{said}, but the job has {nodes}", f"--nodes {value}, or leave it out of the command")
