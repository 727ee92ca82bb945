"""One launcher as a row of data: the variables that it sets, and how a job script starts it."""

from __future__ import annotations

from hpcddp.record import TYPE_CHECKING, Record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import TypeAlias

_NO_OPTIONS: Mapping[str, str] = {}
_NO_CONTAINERS: Mapping[str, Callable[[str, str], tuple[Words, ...]]] = {}

# Who starts processes inside whom. A launcher of a higher depth is found inside one of a lower depth: mpirun starts
# its daemons with srun, srun or mpirun starts torchrun's agents. The other way round exists, but only evidence can
# show it.
RESOURCE_MANAGER, MPI, NODE_AGENT = 0, 1, 2
# How a mark's value begins that `hpcddp exec` set, for programs that look for it: it shows no launcher.
HANDED_ON = "hpcddp-"


class JobStep(Record):
    """Rules for a launcher whose variables the scheduler sets in shells as well, where they say nothing about a rank:
    its launches are steps of a job, which may be smaller than the job. Pure functions of an environment."""

    #: Whether this process is a task of a step.
    is_task: Callable[[Mapping[str, str]], bool]
    #: Whether this is a person's shell in a task, in which a launcher can be typed.
    is_shell_in_task: Callable[[Mapping[str, str]], bool]
    #: Whether the PMIx variables are this launcher's.
    serves_pmix: Callable[[Mapping[str, str]], bool]
    #: LaunchError if the step's variables disagree with each other or with this host's name.
    check: Callable[[Candidate, Mapping[str, str], str | None], None]
    #: (host, source) of rank 0; None where the step does not say it.
    find_rank_0: Callable[[Mapping[str, str], RankInfo], tuple[str | None, str]]
    #: From the process id of its daemon to the id of the shell that this runs; "" for a task.
    find_shell: Callable[[int], str]


class FrontEnd(Record):
    """A program that starts an agent by options of its own. The agent still reads its variables where they say nothing.

    Fields as in `Launcher`; it `reads` those variables and the agent's.
    """

    commands: tuple[str, ...]
    typed: Mapping[str, str]
    rendezvous_options: tuple[str, ...]
    flags: tuple[str, ...]
    reads: Mapping[str, str] = _NO_OPTIONS


class Launcher(Record):
    """A launcher. Variable names; an empty name: this launcher does not say it.

    A row stands in an environment if one of `marks` is set, one of `identity` too (if there are any), and none of
    `excluded_by`. From then on every variable of the row that is not in `optional` must be there: half a row is an
    error.
    """

    name: str
    depth: int
    rank: str
    world_size: str
    local_rank: str = ""
    local_world_size: str = ""
    node_rank: str = ""
    num_nodes: str = ""
    marks: tuple[str, ...] = ()
    identity: tuple[str, ...] = ()
    excluded_by: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    #: Other variables in which people set the node's number.
    other_node_ranks: tuple[str, ...] = ()
    #: For a protocol that many launchers speak, its name: alone, the row is what is left of an unknown launcher.
    protocol: str = ""
    #: Whether people set these variables by hand, so that they need not be from a launcher.
    by_hand: bool = False
    #: Whether the row does not count where another one stands.
    yields: bool = False
    #: For a launcher whose variables stand in shells as well.
    step: JobStep | None = None
    #: Keys of rows whose variables this launcher sets as well; they are the same launch if rank and size agree.
    speaks: tuple[str, ...] = ()
    #: Keys of the rows one of which it calls, which one the loaded modules say: its ranks are theirs, and no variable
    #: tells its own.
    calls: tuple[str, ...] = ()
    #: Names in /proc/<pid>/comm of the process that starts the ranks.
    programs: tuple[str, ...] = ()
    #: How the names of the variables begin that it, or a user for it, sets: what a run's record keeps.
    prefixes: tuple[str, ...] = ()
    #: How those begin that it alone sets, so that no job may.
    reserved_prefixes: tuple[str, ...] = ()
    #: Variables that name the launch, equal on all its ranks and on all nodes.
    launch_id: tuple[str, ...] = ()
    #: Where no variable does: the option of its process on each node (`programs`) that is equal on all of them.
    launch_option: str = ""
    #: Variables in which the launcher gives this node's name.
    host: tuple[str, ...] = ()
    #: Other variables that tell its ranks from another launcher's, with the values that `predict` gives them: {node} is
    #: the node's number, {ranks} its ranks, {tasks} every node's number of ranks, {hosts} their names.
    also_sets: tuple[tuple[str, str], ...] = ()
    #: Variables of which one alone shows this launcher, where half a row is looked for; None: the numbers' own. Empty
    #: where they stand in shells as well, or are another row's.
    stray: tuple[str, ...] | None = None
    #: Whether `programs` were seen with the real launcher: without one among the parents, it started nothing here.
    programs_verified: bool = False
    #: The variable with the name of the program that it started.
    command_variable: str = ""
    #: Variables with the address of its daemon, `<job>.<number>;…`; number 0 is the launcher itself.
    daemon_variables: tuple[str, ...] = ()
    #: The variable with the path of its own description of the launch, in PALS' form.
    layout_file: str = ""
    #: What to do where it does not say of how many ranks the launch is.
    without_size: str = ""
    #: Whether rank 0 may be on another host than the first of the job.
    rank_0_anywhere: bool = False
    #: Whether it sets MASTER_ADDR itself, for this launch.
    sets_master: bool = False
    #: What to type to get N ranks; {n} stands for N.
    command: str = ""
    #: All commands that start ranks with it; of two words where the first alone does not.
    commands: tuple[str, ...] = ()
    #: An option of its command -> hpcddp's, where people type theirs.
    typed: Mapping[str, str] = _NO_OPTIONS
    #: An agent that can be the command of a job: what it reads beside its options, variable -> what it holds; `unset`:
    #: one that no user may set on several nodes.
    reads: Mapping[str, str] = _NO_OPTIONS
    #: Its options of all nodes together, such as those that say where the rendezvous is: one of several nodes must not
    #: be given them.
    rendezvous_options: tuple[str, ...] = ()
    #: Its options that no value follows.
    flags: tuple[str, ...] = ()
    #: Programs that start this agent.
    front_ends: tuple[FrontEnd, ...] = ()
    #: Its option that binds no rank to CPUs, if it does bind them.
    unbound: str = ""
    #: Words by which its `--version` is recognised.
    version_words: tuple[str, ...] = ()
    #: Where several launchers could be meant, the lowest goes first.
    order: int = 100
    #: The program that a job script calls; "" where no script can use this launcher.
    program: str = ""
    #: The schedulers under which it starts processes; empty: every scheduler that lists a job's hosts.
    schedulers: tuple[str, ...] = ()
    #: Whether the scheduler brings it: it is on PATH in every job, it is the first choice there, and its ranks get the
    #: warning signal from the scheduler (sbatch --signal).
    of_scheduler: bool = False
    #: Its options that say how many there are: `nodes`, `processes` in all, or `per_node`. Also what `env` sets for it.
    counts: Mapping[str, str] = _NO_OPTIONS
    #: How it is given the hosts to start on: a line of a file of hosts, its option for the file, and other options that
    #: name hosts. (): it takes none.
    hosts: tuple[str, ...] = ()
    #: Variables that the script has to export for it, beside those of the job.
    settings: tuple[tuple[str, str], ...] = ()
    #: Variables by which it starts processes on other hosts with the program {} in place of ssh.
    remote_shell: tuple[tuple[str, str], ...] = ()
    #: Variables without which it refuses to start ranks for root. They are set on this machine alone: a job on a
    #: cluster is no root's.
    root_settings: tuple[tuple[str, str], ...] = ()
    #: From what is to be started to the words of the command, grouped as the script's lines are. Pure.
    line: Callable[[LaunchRequest], Iterable[Words]] | None = None
    #: Whether, on a single machine, the one of the Python environment goes before the others on PATH.
    environment_first: bool = False
    #: The variable that sends the ranks to the store that its agent hosts, where it is `True`.
    agent_store: str = ""
    #: The variable with the CPUs per rank that the job asked for, and the one by which this launcher has to be given
    #: them; None: it takes them over by itself.
    cpus_per_rank: tuple[str, str] | None = None
    #: The container runtimes that it starts itself: from the image, and what is mounted beside the job's folder and its
    #: run folder, to its options in groups as the script's lines are.
    containers: Mapping[str, Callable[[str, str], tuple[Words, ...]]] = _NO_CONTAINERS

    #: Whether it fills `$NAME` in its program's arguments, so that a dollar sign has to stand twice to arrive once
    #: (torch's agents: string.Template, with local_rank).
    fills_arguments: bool = False

    def as_arguments(self, words: Sequence[str]) -> list[str]:
        """How these words are handed to it, so that its program gets them as they are."""
        return [word.replace("$", "$$") for word in words] if self.fills_arguments else list(words)

    @property
    def is_node_agent(self) -> bool:
        """Whether it makes the ranks of one node, so that something else has to start it once per node."""
        return self.depth == NODE_AGENT and bool(self.program)

    @property
    def all_commands(self) -> tuple[FrontEnd, ...]:
        """The launcher's own commands, then those of its front ends, each with its options."""
        return (FrontEnd(self.commands, self.typed, self.rendezvous_options, self.flags), *self.front_ends)

    @property
    def all_reads(self) -> set[str]:
        """Every variable that it or one of its front ends reads."""
        return {name for one in (self.reads, *(front.reads for front in self.front_ends)) for name in one}


def is_set_by_launcher(env: Mapping[str, str], mark: str) -> bool:
    """Whether a launcher set this variable; `hpcddp exec` sets some for programs that look for them."""
    return mark in env and not env[mark].startswith(HANDED_ON)


def is_present(row: Launcher, env: Mapping[str, str]) -> bool:
    """Whether this launcher left its row in the environment (complete or not)."""
    there = {name for name in (*row.marks, *row.excluded_by) if is_set_by_launcher(env, name)}
    if there.isdisjoint(row.marks) or not there.isdisjoint(row.excluded_by):
        return False
    return not row.identity or any(name in env for name in row.identity)


# ---- the words of a launcher's command line


class FromShell(Record):
    """A word with the values of shell variables in it: `before`, `text` with each `$NAME` replaced, `after` if given.

    `text` stands in double quotes in a script, so it is a constant of this project and never a user's text.
    """

    text: str
    before: str = ""
    after: str | None = None


class IfSet(Record):
    """Words that are there only if the variable is set and not empty. They are constants too."""

    variable: str
    words: tuple[str, ...]


if TYPE_CHECKING:
    Word: TypeAlias = str | FromShell | IfSet
    Words: TypeAlias = tuple[Word, ...]


#: The launcher's path, which the script has looked for.
LAUNCHER_PROGRAM = FromShell("$launcher")
#: The variables that every job's ranks get for `hpcddp exec`.
EXPORTED_ALWAYS = ("HPCDDP_PYTHON", "HPCDDP_RUN_DIR", "HPCDDP_ATTEMPT", "HPCDDP_DEADLINE", "HPCDDP_LOG_RANKS")


class LaunchRequest(Record):
    """Processes to start: the same number on each node.

    `hostfile`: the shell variable with the path of the list of the job's hosts; "": the launcher asks the scheduler.
    `ranks_per_node`: what each process makes, if it is an agent. `exported` and `exported_always` are variables that
    every process needs, `exported_if_set` those that may be unset; only launchers that forward nothing by themselves
    print them. `oversubscribe`: there may be more processes than places. `launcher_options` are the site's own;
    `container_options` start each process in a container.
    """

    nodes: int
    processes_per_node: int
    cpus_per_process: int = 1
    ranks_per_node: int = 1
    hostfile: str = ""
    exported: tuple[str, ...] = ()
    exported_always: tuple[str, ...] = EXPORTED_ALWAYS
    exported_if_set: tuple[str, ...] = ()
    bind: str = ""
    oversubscribe: bool = False
    launcher_options: tuple[str, ...] = ()
    container_options: tuple[Words, ...] = ()

    @property
    def processes(self) -> int:
        return self.nodes * self.processes_per_node


def host_words(job: LaunchRequest, option: str) -> Words:
    """The file that lists the hosts; nothing where the scheduler is asked."""
    return (option, FromShell(f"${job.hostfile}")) if job.hostfile else ()


def each_with(option: str, names: Iterable[str]) -> Iterator[str]:
    """The option before each of the names."""
    for name in names:
        yield option
        yield name


# ---- a process's place among the ranks


#: The numbers of a place, in the order in which people are shown them.
NUMBERS = ("rank", "world_size", "local_rank", "local_world_size", "node_rank", "num_nodes")


class Candidate(Record):
    """The numbers of one launcher for this process. `numbers` has every key of NUMBERS; None: it does not say."""

    key: str
    row: Launcher
    numbers: Mapping[str, int | None]
    source: Mapping[str, str]

    @property
    def size(self) -> int | None:
        return self.numbers["world_size"]

    def describe(self) -> str:
        """Describe it: `openmpi: rank 1 of 4 (OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE)`."""
        size = "?" if self.size is None else self.size
        names = ", ".join(dict.fromkeys(self.source[k] for k in ("rank", "world_size") if k in self.source))
        return f"{self.row.name}: rank {self.numbers['rank']} of {size} ({names})"


class RankInfo(Record):
    """A process's place. `None` where its launcher does not say, never a guess.

    rank in 0 … world_size-1 over all nodes; local_rank in 0 … local_world_size-1 on this node; node_rank in 0 …
    num_nodes-1. All numbers come from one launcher. `source` names, for each number and for `launcher`, the variable
    or file it came from.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    node_rank: int | None
    num_nodes: int | None
    source: Mapping[str, str]
