"""Which commands start processes on the nodes, how many, and what."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from hpcddp.lint.request import Request
from hpcddp.lint.shell import Command
from hpcddp.ranks.launch_commands import PROGRAMS, find_launch_command
from hpcddp.ranks.launchers import LAUNCHERS, NAME_VALUE_OPTIONS, NODE_AGENTS

# torchrun's processes are looked at by themselves: torchrun_words.
_PER_RANK = PROGRAMS - {"torchrun"}
_PROGRAM = re.compile(
    r"(.*/)?(python[\d.]*|torchrun|accelerate(-launch)?|deepspeed|bash|sh|env|numactl|taskset|singularity|apptainer|shifter|podman|nsys|ncu|time)"
    r"|.*\.(py|sh)|\./.*|\$\{?\w*(PYTHON|python)\w*\}?"
)
_OPEN_MPI_ONLY = re.compile(
    r"-x|--?hostfile|--?npernode|--?map-by|--?mca|--?bind-to|--?rankfile|--prtemca|--oversubscribe"
)
# Commands that start the command behind them; found by name also where an option of the launcher stands before them.
_WRAPPERS = {"conda", "mamba", "micromamba", "uv", "poetry", "pixi", "pipenv", "nice", "timeout", "strace", "gdb",
             "dcgmi"}  # fmt: skip
# Commands that make the ranks of a node themselves.
_MAKERS = frozenset(c for name in NODE_AGENTS for made in LAUNCHERS[name].all_commands for c in made.commands) | {
    "deepspeed"
}
_TORCHRUN = frozenset(LAUNCHERS["torchrun"].commands)
_EACH_SLOT = {f"{before}{name}{after}" for name in ("PBS_NP", "SLURM_NTASKS", "SLURM_NPROCS", "NSLOTS")
              for before, after in (("$", ""), ("${", "}"))}  # fmt: skip
#: Options of launchers with the hosts on which they start something, or other programs for others.
NAMED_HOSTS = ("-w", "--nodelist", "-r", "--relative", "--multi-prog", "--het-group", "-H", "-host", "--host", "-hosts",
               "-rankfile", "--rankfile", "-configfile", "--app")  # fmt: skip


class LaunchCommand(NamedTuple):
    """A launcher, its own options, and the words of what it starts (empty where that is not seen)."""

    command: Command
    launcher: str
    options: tuple[str, ...]
    started: tuple[str, ...]

    def option(self, *names: str) -> str | None:
        """The value of the last of these options: `-n 4`, `--ntasks=4`, `-n4`."""
        value = None
        for i, word in enumerate(self.options):
            name, equals, joined = word.partition("=")
            if name in names:
                value = joined if equals else self.options[i + 1] if i + 1 < len(self.options) else None
            elif word[:2] in names and word[2:].isdecimal():
                value = word[2:]
        return value

    def has(self, *names: str) -> bool:
        """One of these options is given."""
        return any(word.partition("=")[0] in names for word in self.options)

    @property
    def is_placed(self) -> bool:
        """The options set the number of processes on each node."""
        counts = ("-npernode", "--npernode", "-N", "-ppn", "--ppn", "-perhost", "--map-by", "-map-by")
        return self.has(*counts, *NAMED_HOSTS)

    @property
    def is_openmpi(self) -> bool:
        """Some option is one that only Open MPI has."""
        return self.launcher != "srun" and any(_OPEN_MPI_ONLY.fullmatch(w.partition("=")[0]) for w in self.options)


def find_launches(commands: Iterable[Command], values: Mapping[str, str]) -> list[LaunchCommand]:
    """Every command that starts one process per rank. A variable with a plain value counts as that."""
    found = []
    for command in commands:
        words = expand(command.words, values)
        at = next((i for i, w in enumerate(words[:4]) if w.rsplit("/", 1)[-1] in _PER_RANK), None)
        if at is None or words[0] in {"which", "command", "type", "echo", "module", "alias", "set", "export"}:
            continue
        rest = words[at + 1 :]
        starts = (i for i, w in enumerate(rest) if _PROGRAM.fullmatch(w) or rank_maker(rest[i : i + 2])[:1] == (w,))
        start = next(starts, len(rest))
        start = _wrapper_start(rest, start) if start < len(rest) else start
        found.append(LaunchCommand(command, words[at].rsplit("/", 1)[-1], tuple(rest[:start]), tuple(rest[start:])))
    return found


def _wrapper_start(words: Sequence[str], start: int) -> int:
    """Find the first word of the command that starts the program at `start`: no option and no value."""
    values = 0
    for i, word in enumerate(words[:start]):
        if word.startswith("-"):
            values = 0 if "=" in word else 2 if word.lstrip("-") in NAME_VALUE_OPTIONS else 1
        elif word.rsplit("/", 1)[-1] in _WRAPPERS or (not values and not word.startswith("$")):
            return i
        else:
            values -= values > 0
    return start


def per_node(launch: LaunchCommand, request: Request) -> int | None:
    """Processes that it starts on each node; None where script and options leave it open."""
    mapped = re.search(r"ppr:(\d+):node", launch.option("--map-by", "-map-by") or "")
    if mapped:
        return int(mapped[1])
    names = ("--ntasks-per-node", "-npernode", "--npernode", "-N", "-ppn", "--ppn", "-perhost", "-ppn")
    value = launch.option(*(n for n in names if not (n == "-N" and launch.launcher == "srun")))
    if value is not None:
        return int(value) if value.isdecimal() else None
    if _EACH_SLOT & set(launch.options):
        return request.slots
    ranks = count_processes(launch)
    nodes = request.nodes
    if launch.launcher == "srun":
        nodes = int(n) if (n := launch.option("-N", "--nodes") or "").isdecimal() else nodes
        if ranks is None and launch.option("-n", "--ntasks") is None:
            return request.slots
    elif ranks is None and launch.option("-np", "-n", "--np") is None:
        return request.slots
    return ranks // nodes if ranks and nodes and ranks % nodes == 0 else None


def count_processes(launch: LaunchCommand) -> int | None:
    """Processes in all, if its options give a number."""
    value = launch.option("-n", "--ntasks") if launch.launcher == "srun" else launch.option("-np", "-n", "--np", "--n")
    return int(value) if value and value.isdecimal() else None


def rank_maker(words: Sequence[str]) -> tuple[str, ...]:
    """The words from torchrun, `accelerate launch` or deepspeed on, or () where none is started."""
    for i in range(len(words)):
        found = find_launch_command(words[i : i + 2])
        if found and found[0] == 0 and found[1] in _MAKERS:
            return tuple(words[i:])
    return ()


def torchrun_words(words: Iterable[str]) -> tuple[str, ...]:
    """The words from torchrun on, or () where it is not started."""
    made = rank_maker(tuple(words))
    found = find_launch_command(made[:2])
    return made if found and found[1] in _TORCHRUN else ()


def torchrun_option(words: Iterable[str], name: str) -> str | None:
    """The value of a torchrun option, whichever way its name is spelled: --nproc-per-node or --nproc_per_node."""
    listed = tuple(words)
    for i, word in enumerate(listed):
        key, equals, value = word.partition("=")
        if key.replace("_", "-") == f"--{name}":
            return value if equals else listed[i + 1] if i + 1 < len(listed) else None
    return None


def trains(words: tuple[str, ...]) -> bool:
    """The command is `python FILE.py`, not `python -c` or `-m pip`."""
    if not words or not re.fullmatch(r"(.*/)?python[\d.]*", words[0]):
        return False
    first = next((w for w in words[1:] if not w.startswith("-") or w in {"-c", "-m"}), "")
    return first.endswith(".py")


def expand(words: Iterable[str], values: Mapping[str, str]) -> tuple[str, ...]:
    """The words with the variables whose plain values are known; one that is a variable may be several words."""
    found: list[str] = []
    for word in words:
        text = re.sub(r"\$(?:(\w+)|\{(\w+)\})", lambda name: values.get(name[1] or name[2], name[0]), word)
        found += text.split() if re.fullmatch(r"\$(\w+|\{\w+\})", word) else [text]
    return tuple(found)
