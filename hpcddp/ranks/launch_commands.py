"""Which launcher a command belongs to: what starts ranks, and whose mpirun answers to `--version`."""

from __future__ import annotations

from hpcddp.ranks.launchers import LAUNCHERS, NODE_AGENTS
from hpcddp.record import TYPE_CHECKING, Record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


# What starts ranks as well and has no row: no rank's variables of it were ever recorded.
_FOREIGN = (
    *("aprun", "deepspeed", "-m deepspeed.launcher.runner", "-m deepspeed.launcher.launch"),
    *("fabric run", "lightning run", "-m lightning.fabric.cli", "-m lightning_fabric.cli"),
    *("composer", "-m composer.cli.launcher", "horovodrun", "-m horovod.runner.launch", "colossalai run"),
    *("torchx run", "tune run"),
)
_WORDS = {"composer"}  # it may be a value of a program's option, too
#: Commands that start one process per rank; of two words where the first alone does not.
COMMANDS = frozenset(
    (*(command for row in LAUNCHERS.values() for made in row.all_commands for command in made.commands), *_FOREIGN)
)
#: Their programs.
PROGRAMS = frozenset(command for command in COMMANDS if " " not in command)


class NodeAgentCommand(Record):
    """A command that starts the ranks of one node, such as `accelerate launch`. `node_agent`: the launcher whose
    variables its ranks get. The other fields as in `Launcher`."""

    command: str
    node_agent: str
    typed: Mapping[str, str]
    rendezvous_options: tuple[str, ...]
    flags: tuple[str, ...]
    reads: Mapping[str, str]


def find_launch_command(words: Sequence[str]) -> tuple[int, str] | None:
    """The first launcher command that a command starts, without its folder (`mpirun`, `flux run`), and where it stands:
    behind an interpreter, `env` or `numactl`, before the training script."""
    for i, word in enumerate(words):
        if word.endswith(".py") and " " not in word:
            return None
        if word in _WORDS and any(before.rsplit("/", 1)[-1].startswith("python") for before in words[:i]):
            continue
        program = word.rsplit("/", 1)[-1]
        pair = " ".join((program, *words[i + 1 : i + 2]))
        if program in COMMANDS or pair in COMMANDS:
            return i, program if program in COMMANDS else pair
    return None


def starts_python_or_ranks(words: Sequence[str]) -> bool:
    """Whether the words start a Python, also behind `env`, `numactl` or a container's start, or a launcher."""
    names = [word.rsplit("/", 1)[-1] for word in words]
    python = any(name.startswith("python") or name.endswith(".py") for name in names)
    return python or find_launch_command(words) is not None


def find_node_agent(words: Sequence[str]) -> tuple[int, NodeAgentCommand] | None:
    """The node agent that a command starts, and where it stands; None also if another launcher comes before it."""
    found = find_launch_command(words)
    if found is None:
        return None
    at, name = found
    for row in (LAUNCHERS[node_agent] for node_agent in NODE_AGENTS if LAUNCHERS[node_agent].reads):
        for made in row.all_commands:
            if name in made.commands:
                options = (made.typed, made.rendezvous_options, made.flags)
                return at, NodeAgentCommand(name, row.name, *options, {**row.reads, **made.reads})
    return None


def read_node_agent_options(words: Sequence[str], node_agent: NodeAgentCommand) -> dict[str, str]:
    """The options of a node agent that stand before its program, and their values, "" where there is none. A name has
    `-` for `_`, and is in full where it begins one of the agent's."""
    known = (*node_agent.typed, *node_agent.rendezvous_options, *node_agent.flags)
    found, rest = dict[str, str](), list(words)
    while rest and rest[0].startswith("-"):
        name, equals, value = rest.pop(0).partition("=")
        name = name.replace("_", "-")
        name = next((full for full in known if full == name or (full.startswith(name) and len(name) > 4)), name)
        if not equals and name not in node_agent.flags and rest and rest[0][-3:] != ".py" and rest[0][:2] != "--":
            value = rest.pop(0)
        found[name] = value
    return found


def hint_instead_of(command: str) -> str:
    """The hint on what to type instead of a command that starts its ranks with this launcher command."""
    node_agent = next((name for name in NODE_AGENTS if command in LAUNCHERS[name].commands), "")
    further = f" (and --launcher {node_agent} if {node_agent} shall start it)" if node_agent else ""
    return f"give the training script itself: -- python train.py{further}"


def launcher_of_version(answer: str) -> str | None:
    """Which launcher says this when it is called with `--version`; None for an unknown one."""
    return next((key for key, row in LAUNCHERS.items() if any(w in answer for w in row.version_words)), None)
