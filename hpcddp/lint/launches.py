"""Which commands start processes on the nodes, how many, and what."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from hpcddp.lint.request import Request
from hpcddp.lint.shell import Command
from hpcddp.ranks.launch_commands import PROGRAMS, find_agent, find_launch_command, split_agent_options
from hpcddp.ranks.launchers import AGENTS, LAUNCHERS

# torchrun's processes are looked at by themselves: torchrun_words.
_PER_RANK = PROGRAMS - {"torchrun"}
_PYTHON = re.compile(r"(.*/)?python[\d.]*|env|bash|sh")
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
_TWO_VALUES = {"-mca", "--mca", "-gmca", "--gmca", "--prtemca", "--pmixmca", "-env", "-genv"}
# Commands that make the ranks of a node themselves.
_MAKERS = frozenset(c for name in AGENTS for made in LAUNCHERS[name].all_commands for c in made.commands) | {
    "deepspeed"
}
_TORCHRUN = frozenset(LAUNCHERS["torchrun"].commands)
_EACH_SLOT = {f"{before}{name}{after}" for name in ("PBS_NP", "SLURM_NTASKS", "SLURM_NPROCS", "NSLOTS")
              for before, after in (("$", ""), ("${", "}"))}  # fmt: skip
#: Options of launchers with the hosts on which they start something, or other programs for others.
NAMED_HOSTS = ("-w", "--nodelist", "-r", "--relative", "--multi-prog", "--het-group", "-H", "-host", "--host", "-hosts",
               "-rankfile", "--rankfile", "-configfile", "--app")  # fmt: skip
_ARGUMENTS = {"$@", "$*", "${@}", "${*}"}
#: Variables that hpcddp sets itself.
ADDRESS = {"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "NODE_RANK", "OMP_NUM_THREADS",
           "SRUN_CPUS_PER_TASK"}  # fmt: skip
_RENDEZVOUS = {"--main-process-port", "--same-network", "--deepspeed-hostfile"}
# Options of launchers for what hpcddp works out itself.
_WORKED_OUT = {
    *("-n", "-np", "--np", "--n", "--ntasks", "-N", "--nodes", "--ntasks-per-node", "-ppn", "--ppn", "-perhost"),
    *("-npernode", "--npernode", "-pernode", "-hostfile", "--hostfile", "-machinefile", "--machinefile", "-f", "-x"),
    *("--map-by", "-map-by", "--bind-to", "-bind-to", "-c", "--cpus-per-task", "--mpi", "-u", "--unbuffered", "-l"),
    *("--label", "-K", "--kill-on-bad-exit", "--cpu-bind", "--export", "-bootstrap", "-env", "-genv", "--mca", "-mca"),
}


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
    def is_placed(self) -> bool:
        """Whether its options say how many processes each node gets."""
        counts = ("-npernode", "--npernode", "-N", "-ppn", "--ppn", "-perhost", "--map-by", "-map-by")
        return self.has(*counts, *NAMED_HOSTS)

    @property
    def is_openmpi(self) -> bool:
        """Whether its options are Open MPI's own."""
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
    """Where the command that the program at `start` is started by begins: a word that is no option and no value."""
    values = 0
    for i, word in enumerate(words[:start]):
        if word.startswith("-"):
            values = 0 if "=" in word else 2 if word in _TWO_VALUES else 1
        elif word.rsplit("/", 1)[-1] in _WRAPPERS or (not values and not word.startswith("$")):
            return i
        else:
            values -= values > 0
    return start


def per_node(launch: LaunchCommand, request: Request) -> int | None:
    """Processes that it starts on each node, where script and options say so plainly."""
    mapped = re.search(r"ppr:(\d+):node", launch.option("--map-by", "-map-by") or "")
    if mapped:
        return int(mapped[1])
    names = ("--ntasks-per-node", "-npernode", "--npernode", "-N", "-ppn", "--ppn", "-perhost", "-ppn")
    said = launch.option(*(n for n in names if not (n == "-N" and launch.launcher == "srun")))
    if said is not None:
        return int(said) if said.isdecimal() else None
    if _EACH_SLOT & set(launch.options):
        return request.slots
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


class Program(NamedTuple):
    """What a script runs in its ranks, and how many on a node. `unknown`: words whose values only the script knows;
    `ranks`: those of the whole job, as the launcher's option says; `left_out`: what else stands in the script."""

    words: tuple[str, ...] = ()
    ranks_per_node: int | None = None
    unknown: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    ranks: int | None = None


def find_program(
    commands: Sequence[Command], launches: Sequence[LaunchCommand], values: Mapping[str, str], request: Request
) -> Program:
    """The program with the most ranks, the first of such: behind a launcher, torchrun, `accelerate launch`,
    deepspeed."""
    # one whose output is read is a helper
    starting = sorted(launches, key=lambda launch: (launch.command.captured, -_ranks(launch, values, request)))
    launch = next((launch for launch in starting if launch.started), None)
    words = launch.started if launch else ()
    each, ranks = (per_node(launch, request), count(launch)) if launch else (None, None)
    if launch and launch.launcher != "srun" and (_EACH_SLOT & {*launch.options} or not launch.has("-np", "-n", "--np")):
        ranks = request.ranks
    if launch is None and not any(rank_maker(c.words) for c in commands):
        return Program()
    made, maker = rank_maker(words), None
    if not made:
        maker = next((c for c in commands if rank_maker(c.words)), None)
        made = rank_maker(maker.words) if maker else ()
    if launch is None or (maker and maker.text not in launch.command.text):
        launch, each, ranks = None, None, None  # the ranks are made elsewhere
    left_out = _around(launch, values) if launch else []
    chosen = launch.command if launch else maker
    assert chosen is not None  # one of them is there
    if made:
        around = words[: len(words) - len(made)] if launch and not maker else ()
        around = maker.words[: len(maker.words) - len(made)] if maker else around
        left_out += [" ".join(around)] if [w for w in around if not _PYTHON.fullmatch(w)] else []
        words, number, of_all = _made_ranks(expand(made, values))
        shares = number // request.nodes if number and of_all and request.nodes else number
        together = shares * (1 if of_all else each or 1) if shares else None
        if shares and together and together > max(shares, request.gpus_per_node or 0) and shares > 1:
            left_out += [f"{together} ranks per node (M15)"]  # as many as each of them makes are meant
            together = shares
        each, ranks = together or request.gpus_per_node, None
    left_out += _list_other_programs(commands, launches, chosen, maker)
    words = expand(words, values)
    left_out += [f"the script's own arguments ({word})" for word in words if word in _ARGUMENTS]
    words = tuple(word for word in words if word not in _ARGUMENTS)
    given = {*chosen.expands, *(maker or chosen).expands, *"123456789"}
    unknown = []
    for before, word in pairwise(("", *words)):
        names = re.findall(r"\$\{?(\w+)", word)
        if re.search(r"\$\(|`", word) or (names and (before != "-c" or given.intersection(names))):
            unknown.append(word)  # in the text for a rank's shell, that shell's variables are known
    return Program(words, each, tuple(unknown), tuple(left_out), ranks)


def _ranks(launch: LaunchCommand, values: Mapping[str, str], request: Request) -> int:
    """How many ranks a launcher starts, as far as one can see."""
    nodes = launch.option("-N", "--nodes") if launch.launcher == "srun" else None
    on = int(nodes) if nodes and nodes.isdecimal() else request.nodes or 1
    started = count(launch) or on * (per_node(launch, request) or request.slots or 1)
    made = rank_maker(launch.started)
    number = _made_ranks(expand(made, values))[1] if made else 1
    return started * (number or request.gpus_per_node or 1)


def _around(launch: LaunchCommand, values: Mapping[str, str]) -> list[str]:
    """What stands around a launcher and its program: its other options, variables, files, pipes, loops."""
    command = launch.command
    words = expand(command.words, values)
    at = len(words) - 1 - len(launch.options) - len(launch.started)
    names = [w.partition("=")[0] for w in launch.options if w.startswith("-")]
    names = [name[:2] if re.fullmatch(r"-\w\d+", name) else name for name in names]  # -n2
    found = [f"{launch.launcher} {name}" for name in names if name not in _WORKED_OUT]
    found += _list_settings(command)
    given = [launch.option("--export") or "", *_values_of(launch.options, "-x", "-env", "-genv")]
    found += [w for w in ",".join(given).split(",") if "=" in w and w.partition("=")[0] not in ADDRESS]
    found += [f"{' '.join(words[:at])} (in front of {launch.launcher})"] if at else []
    found += [f"{launch.launcher} {sign} {name}" for sign, name in command.files]
    found += [f"| {name}" for name in command.into]
    return found + [f"the loop: {loop}" for loop in command.loops]


def _values_of(words: Sequence[str], *names: str) -> list[str]:
    """The values of an option that may stand several times; `-genv NAME VALUE` as `NAME=VALUE`."""
    found = []
    for i, word in enumerate(words):
        if word in names:
            value = words[i + 1 : i + (3 if word in _TWO_VALUES else 2)]
            found.append("=".join(value))
    return found


def _list_other_programs(
    commands: Sequence[Command], launches: Sequence[LaunchCommand], chosen: Command, maker: Command | None
) -> list[str]:
    """The other programs, and what is around a command that makes the ranks itself, in what is launched."""
    others = [one.command for one in launches]
    others += [c for c in commands if trains(c.words) or rank_maker(c.words)]
    outside = [c for c in others if c.text not in chosen.text]
    found = [
        f"{c.text} (line {c.line})" for c in outside if not any(c.text in o.text for o in outside if o.text != c.text)
    ]
    if maker and maker is not chosen:
        inside = [c for c in commands if c.launched and c is not maker and c.text in chosen.text]
        found += [c.text for c in inside if _list_settings(c) or (c.words and c.program not in {"export", "cd"})]
        found += _list_settings(maker)
    return found


def _list_settings(command: Command) -> list[str]:
    return [f"{name}={value}" for name, value in command.sets if name not in ADDRESS]


def rank_maker(words: Sequence[str]) -> tuple[str, ...]:
    """The words from torchrun, `accelerate launch` or deepspeed on, or () where none is started."""
    for i in range(len(words)):
        found = find_launch_command(words[i : i + 2])
        if found and found[0] == 0 and found[1] in _MAKERS:
            return tuple(words[i:])
    return ()


def _made_ranks(words: tuple[str, ...]) -> tuple[tuple[str, ...], int | None, bool]:
    """What a command that makes ranks itself runs in them, how many it makes, and whether on all nodes together."""
    found = find_launch_command(words)
    assert found is not None  # the caller has looked
    at, name = found
    agent = find_agent(words)
    flags = agent[1].flags if agent else ("--no-ssh", "--no-python", "--no-local-rank", "-m", "--module")
    options, rest = split_agent_options(words[at + len(name.split()) :], flags)
    given = {option: value for option, _, value in options}
    module = ("-m",) if {"-m", "--module"} & given.keys() else ()
    python = () if "--no-python" in given else ("python", *module)
    program = (*python, *rest) if rest else ()
    if agent and not torchrun_words(words):  # a front end, which hpcddp starts as it stands
        dropped = {*_RENDEZVOUS, *agent[1].rendezvous_options, *agent[1].typed} - {agent[1].needs}
        keep = [w for o, written, v in options if o not in dropped for w in (written, v) if w is not None]
        program = (*words[:at], *name.split(), *keep, *rest) if rest or keep else ()
        number = given.get(agent[1].counts_all or "--nproc-per-node")
        return program, int(number) if number and number.isdecimal() else None, bool(agent[1].counts_all)
    number = (
        given.get("--nproc-per-node")
        or given.get("--num-gpus")
        or ("1" if "--nproc-per-node" in (agent[1].typed if agent else ()) else "")
    )
    return program, int(number) if number.isdecimal() else None, False


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
    """Whether a command is a Python script run as it stands, and not a question such as `python -c` or `-m pip`."""
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
