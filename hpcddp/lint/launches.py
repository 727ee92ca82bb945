"""Which commands start processes on the nodes, how many, and what."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from hpcddp.lint.request import Request
from hpcddp.lint.shell import Command
from hpcddp.ranks.launch_commands import PROGRAMS

# torchrun's processes are looked at by themselves: torchrun_words.
_PER_RANK = PROGRAMS - {"torchrun"}
# Programs that reach other nodes by themselves: where one stands, it is not known what runs where.
REACHES = {*_PER_RANK, "ssh", "rsh", "pdsh", "clush", "pbsdsh", "pbs_tmrsh", "parallel", "ray", "dask",
           "horovodrun", "accelerate", "colossalai", "flux", "blaunch", "charmrun"}  # fmt: skip
_PROGRAM = re.compile(
    r"(.*/)?(python[\d.]*|torchrun|bash|sh|env|numactl|taskset|singularity|apptainer|shifter|podman|nsys|ncu|time)"
    r"|.*\.(py|sh)|\./.*|\$\{?\w*(PYTHON|python)\w*\}?"
)
_OPEN_MPI_ONLY = re.compile(
    r"-x|--?hostfile|--?npernode|--?map-by|--?mca|--?bind-to|--?rankfile|--prtemca|--oversubscribe"
)


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
        """Whether one of these options stands there."""
        return any(word.partition("=")[0] in names for word in self.options)

    @property
    def is_openmpi(self) -> bool:
        """Whether its options are Open MPI's own."""
        return self.launcher != "srun" and any(_OPEN_MPI_ONLY.fullmatch(w.partition("=")[0]) for w in self.options)


def find_launches(commands: Iterable[Command], values: Mapping[str, str]) -> list[LaunchCommand]:
    """Every command that starts one process per rank. A variable that holds one plain word counts as that word."""
    found = []
    for command in commands:
        words = [_expand(w, values) for w in command.words]
        at = next((i for i, w in enumerate(words[:4]) if w.rsplit("/", 1)[-1] in _PER_RANK), None)
        if at is None or words[0] in {"which", "command", "type", "echo", "module", "alias", "set", "export"}:
            continue
        rest = words[at + 1 :]
        start = next((i for i, w in enumerate(rest) if _PROGRAM.fullmatch(w)), len(rest))
        found.append(LaunchCommand(command, words[at].rsplit("/", 1)[-1], tuple(rest[:start]), tuple(rest[start:])))
    return found


def per_node(launch: LaunchCommand, request: Request) -> int | None:
    """Processes that it starts on each node, where script and options say so plainly."""
    mapped = re.search(r"ppr:(\d+):node", launch.option("--map-by", "-map-by") or "")
    if mapped:
        return int(mapped[1])
    names = ("--ntasks-per-node", "-npernode", "--npernode", "-N", "-ppn", "--ppn", "-perhost", "-ppn")
    said = launch.option(*(n for n in names if not (n == "-N" and launch.launcher == "srun")))
    if said is not None:
        return int(said) if said.isdecimal() else None
    ranks = count(launch)
    nodes = request.nodes
    if launch.launcher == "srun":
        nodes = int(n) if (n := launch.option("-N", "--nodes") or "").isdecimal() else nodes
        if ranks is None and launch.option("-n", "--ntasks") is None:
            return request.slots
    elif ranks is None and launch.option("-np", "-n", "--np") is None:
        return request.slots
    return ranks // nodes if ranks and nodes and ranks % nodes == 0 else None


def count(launch: LaunchCommand) -> int | None:
    """Processes in all, if its options give a number."""
    said = launch.option("-n", "--ntasks") if launch.launcher == "srun" else launch.option("-np", "-n", "--np", "--n")
    return int(said) if said and said.isdecimal() else None


def torchrun_words(words: Iterable[str]) -> tuple[str, ...]:
    """The words from torchrun on, or () where it is not started."""
    listed = tuple(words)
    for i, word in enumerate(listed):
        if word.rsplit("/", 1)[-1] == "torchrun":
            return listed[i:]
        if word in {"torch.distributed.run", "torch.distributed.launch"} and listed[i - 1 : i] == ("-m",):
            return listed[i:]
    return ()


def torchrun_option(words: Iterable[str], name: str) -> str | None:
    """The value of a torchrun option, whichever way its name is spelled: --nproc-per-node or --nproc_per_node."""
    listed = tuple(words)
    for i, word in enumerate(listed):
        key, equals, value = word.partition("=")
        if key.replace("_", "-") == f"--{name}":
            return value if equals else listed[i + 1] if i + 1 < len(listed) else None
    return None


def trains(words: tuple[str, ...]) -> bool:
    """Whether a command is a Python script run as it stands, and not a question such as `python -c` or `-m pip`."""
    if not words or not re.fullmatch(r"(.*/)?python[\d.]*", words[0]):
        return False
    first = next((w for w in words[1:] if not w.startswith("-") or w in {"-c", "-m"}), "")
    return first.endswith(".py")


def _expand(word: str, values: Mapping[str, str]) -> str:
    plain = re.fullmatch(r"\$\{?(\w+)\}?", word)
    return values.get(plain[1], word) if plain else word
