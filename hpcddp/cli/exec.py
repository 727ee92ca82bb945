"""`hpcddp exec -- command …`: runs a command with RANK, WORLD_SIZE, … set.

Every rendered launcher line ends in it. It finds this process's rank in the launcher's variables, exports torch's, and
replaces itself by the command. In a job with a supervisor it stays beside the command, as its agent."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hpcddp import guard
from hpcddp.errors import HpcddpError, LaunchError, RequestError
from hpcddp.ranks.launchers import LAUNCHERS, NODE_AGENTS
from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.runs import rank_files
from hpcddp.runs.folder import COMMAND, SEPARATOR, RunFolder, find_attempt
from hpcddp.runs.heartbeat import HEARTBEAT_VARIABLE, NO_RANK

if TYPE_CHECKING:
    import argparse
    from typing import NoReturn

    from hpcddp.cli.parser import VerbParser
    from hpcddp.ranks.launch import Launch
    from hpcddp.ranks.launcher import RankInfo
    from hpcddp.ranks.rendezvous import Rendezvous
    from hpcddp.supervisor.agent import Agent

_CANNOT_RUN = 127  # what a shell says then
_LONGEST_WORDS = 30_000  # characters, of up to four bytes: a variable may have 128 KiB, and the kernel runs no other

_DESCRIPTION = """\
Run a command with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, … set from the launcher's variables. Any script that
calls init_process_group("env://") then runs under mpirun or srun unchanged.

The exit status is the command's own, once it runs."""


def build_parser() -> VerbParser:
    from hpcddp.cli.parser import VerbParser  # argparse, which `run_command` does without

    parser = VerbParser(
        "exec",
        _DESCRIPTION,
        example="mpirun -np 8 hpcddp exec -- python train.py",
        exits=(2, 4),
        takes_command=True,
    )
    parser.usage = "hpcddp exec [options] -- command [argument ...]"
    batch = parser.add_argument_group("placeholders in the command")
    batch.add_argument("--global-batch", metavar="B", help="for {global_batch}, {per_rank_batch}, {micro_batch}")
    batch.add_argument("--max-micro-batch", metavar="M", help="for {micro_batch} and {accumulation}")
    gpus = parser.add_argument_group("a job with GPUs")
    gpus.add_argument("--gpus-per-node", metavar="G", help="refuse to start where no GPU can be seen")
    ranks = parser.add_argument_group("a command that makes the ranks of a node itself, started once per node")
    ranks.add_argument("--nodes", metavar="N", help="nodes of the launch")
    ranks.add_argument("--ranks-per-node", metavar="R", help="ranks that the command makes on each of them")
    return parser


def torch_variables(info: RankInfo, rendezvous: Rendezvous) -> dict[str, str]:
    """Variables that torch's `env://` start reads. Raises LaunchError where the environment cannot say a number."""
    values = {
        "RANK": info.rank,
        "WORLD_SIZE": info.world_size,
        "LOCAL_RANK": info.local_rank,
        "LOCAL_WORLD_SIZE": info.local_world_size,
        "GROUP_RANK": info.node_rank,
        "MASTER_ADDR": rendezvous.master_addr,
        "MASTER_PORT": rendezvous.master_port,
    }
    if info.world_size == 1:
        # Nobody else has to find a single process: any free port of its own machine will do.
        values["MASTER_ADDR"] = rendezvous.master_addr or "127.0.0.1"
        values["MASTER_PORT"] = rendezvous.master_port or _free_port()
    # torchrun's name for the node's rank. A plain mpirun does not set it, and no env:// script needs it.
    missing = [name for name, value in values.items() if value is None and name != "GROUP_RANK"]
    if missing:
        raise LaunchError(
            f"the environment of {info.launcher} does not say {', '.join(missing)}"
            f" (rank {info.rank} of {info.world_size})",
            "give every rank MASTER_ADDR=<host of rank 0> and MASTER_PORT, or use a script of `hpcddp render`",
        )
    return {name: str(value) for name, value in values.items() if value is not None}


def run(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Run the command; see `run_command`. RequestError without one."""
    if not args.command:
        raise RequestError("there is no command to run", "hpcddp exec -- python train.py")
    return run_command(args.command, env, _parse_options({name: getattr(args, name) for name in ExecOptions._fields}))


def run_plain(command: list[str], env: Mapping[str, str], words: list[str]) -> int | None:
    """Run the command, where each option is a whole name and its value, as in a job script; None for other words.

    Without argparse, which would be a tenth of exec's time on every rank."""
    names = [word.removeprefix("--").replace("-", "_") for word in words[::2]]
    if len(words) % 2 or not all(word.startswith("--") for word in words[::2]) or {*names} - {*ExecOptions._fields}:
        return None
    return run_command(command, env, _parse_options(dict(zip(names, words[1::2], strict=True))))


def run_command(command: list[str], env: Mapping[str, str], options: ExecOptions) -> int:
    """Replace this process by the command, with this rank's variables set, or run it beside this process. Does not
    return. RequestError for an empty word, which an unset variable gives."""
    if not command[0].strip():
        raise RequestError(f"the command begins with an empty word, {command[0]!r}", "hpcddp exec -- python train.py")
    from hpcddp.ranks.device import GPUS_PER_NODE
    from hpcddp.ranks.launch import Launch
    from hpcddp.ranks.reach import require_resolved
    from hpcddp.ranks.rendezvous import is_enough

    hostname = os.uname().nodename
    # the command of a job of one node makes the ranks, and has no launcher: its script starts it
    launch = Launch({**env, "HPCDDP_LAUNCHER": "none"} if options.nodes == 1 else env, hostname)
    job_output = os.dup(2)  # closed by exec
    info = None
    try:
        info, rendezvous = launch.info, launch.rendezvous
        if info.world_size > 1 and not is_enough(rendezvous, env, info):
            rendezvous = _ask_run_folder(launch, hostname) or rendezvous
        if info.world_size > 1 and rendezvous.master_addr is not None:
            require_resolved(rendezvous.master_addr, rendezvous.source["master_addr"], hostname)
        exported = {name: value for name, value in env.items() if name != GPUS_PER_NODE}  # of a job around this one
        exported |= refuse_missing_gpus(command, env, info, hostname, options.gpus_per_node)
        exported |= torch_variables(info, rendezvous)
        exported |= further_variables(command, exported, launch, options)
        words = SEPARATOR.join(command)  # by which a run is compared, whatever process of the command opens it
        exported[COMMAND] = words if len(words) < _LONGEST_WORDS else ""
        command = fill_command(command, exported, info, options)
        # Left by an outer launcher, it would turn every rank into a client of a store that nobody serves.
        for row in LAUNCHERS.values():
            if row.name != info.launcher:
                exported.pop(row.agent_store, None)
        log = rank_files.record_rank(exported, info.rank, hostname)
    except HpcddpError as error:
        _refuse(error, _make_agent(env, info, hostname), job_output)
    agent = _make_agent(env, info, hostname)  # not before: a shared file system may show the folder late
    if agent is not None:
        marks = tuple(exported[guard.RANK_MARKS].split()) if options.nodes and guard.RANK_MARKS in exported else ()
        return _run_with_agent(command, exported, info, job_output, log, agent, marks)
    try:
        os.execvpe(command[0], command, exported)
    except OSError as error:
        _refuse(_cannot_run(command, error), None, job_output)


def _make_agent(env: Mapping[str, str], info: RankInfo | None, hostname: str) -> Agent | None:
    """Make the rank's agent; None if no supervisor listens, and in a rank that has an agent already.
    `info`: None where the environment does not say which rank this is."""
    folder = find_attempt(env) if env.get("HPCDDP_LOG_RANKS") == "1" else None
    if folder is None or env.get(HEARTBEAT_VARIABLE):
        return None
    from hpcddp.supervisor.agent import Agent
    from hpcddp.supervisor.wire import read_supervisor_address

    address = read_supervisor_address(folder)
    rank, world_size = (info.rank, info.world_size) if info is not None else (NO_RANK, 0)
    return None if address is None else Agent(folder, address, rank, world_size, hostname, env)


def _refuse(refusal: HpcddpError, agent: Agent | None, job_output: int, status: int | None = None) -> NoReturn:
    """Print why the command does not run, or have the supervisor print it once for all ranks, and end. `status`: for
    the supervisor."""
    from hpcddp.cli.streams import print_message

    # before this process ends: its launcher then ends the other ranks
    is_heard = agent is not None and agent.refuse(status or refusal.exit_code, str(refusal))
    if not is_heard:
        os.dup2(job_output, 2)
        print_message(str(refusal))
    if agent is not None:
        agent.wait_for_others()
    raise SystemExit(refusal.exit_code)


def _cannot_run(command: list[str], error: OSError) -> LaunchError:
    return LaunchError(
        f"cannot run {command[0]!r}: {error.strerror}",
        "check the command's spelling, and that it is on PATH on every node",
    )


def _run_with_agent(
    command: list[str],
    env: dict[str, str],
    info: RankInfo,
    job_output: int,
    log: rank_files.RankLog | None,
    agent: Agent,
    rank_marks: tuple[str, ...],
) -> NoReturn:
    """Run the command as a process beside this one, and report how it has ended. `rank_marks`: the variables of each
    rank that the command starts, where it is an agent."""
    from hpcddp.cli.streams import print_message
    from hpcddp.supervisor.agent import BY_SUPERVISOR, RankProgram, Stderr, end_alike
    from hpcddp.supervisor.wire import Ended

    stderr = None if log else Stderr(job_output)
    env[HEARTBEAT_VARIABLE] = agent.path
    agent.outlive()
    try:
        by_scheduler = info.launcher in LAUNCHERS and LAUNCHERS[info.launcher].of_scheduler
        steps = [mark for row in LAUNCHERS.values() if row.of_scheduler for mark in row.marks]
        in_step = not by_scheduler and any(mark in env for mark in steps)
        entry, apart = stderr.entry if stderr else None, not by_scheduler
        program = RankProgram(command, env, entry, apart=apart, in_step=in_step, rank_marks=rank_marks)
    except OSError as error:
        _refuse(_cannot_run(command, error), agent, job_output, _CANNOT_RUN)
    if stderr:
        stderr.start()
    agent.start(program.process, lambda number: program.give(number, BY_SUPERVISOR))
    if info.local_rank == 0:
        agent.measure()
    status = program.wait(agent.send_signal)
    if stderr:
        stderr.finish()
    from hpcddp.runs.failure import choose_lines, read_log_end

    output, path = "", log.path if log else ""
    if status and not agent.was_ended:
        text = stderr.end if stderr else read_log_end(path, log.start) if log else ""
        output = "\n".join(choose_lines(text))
    agent.end(Ended(status, output, path, is_printed=log is None))
    agent.end_left(print_message)
    agent.wait_for_others()
    end_alike(status)


def _ask_run_folder(launch: Launch, hostname: str) -> Rendezvous | None:
    """The rendezvous through a file in the run folder: MPI would wait for a `finalize` that nobody sends. None without
    a run folder or a key for the launch."""
    from hpcddp.ranks.reach import find_local_address
    from hpcddp.ranks.rendezvous import Rendezvous, port_candidates
    from hpcddp.runs import rank_0
    from hpcddp.runs.state import check_run_folder

    info, (key, _) = launch.info, launch.local_key
    run_dir = launch.env.get("HPCDDP_RUN_DIR", "")
    if not run_dir or not key:
        return None
    ports = port_candidates(key)
    folder = RunFolder(run_dir).rendezvous
    if info.rank == 0:
        check_run_folder(RunFolder(run_dir))
        address = "127.0.0.1" if info.local_world_size == info.world_size else find_local_address(launch.env, hostname)
        # In order: the next launch of the same attempt gets the same port, so that an old file misleads nobody.
        port = next((port for port in ports if _is_free(port)), ports[0])
        rank_0.publish_address(folder, key, address, port)
    address, port = rank_0.wait_for_address(folder, key)
    path = rank_0.address_path(folder, key)
    return Rendezvous(address, port, {"master_addr": path, "master_port": path})


def _is_free(port: int) -> bool:
    from hpcddp.ranks.reach import open_listener

    try:
        open_listener(port).close()  # on every address, as torch's store listens
    except OSError:
        return False
    return True


def _free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


# ---- what the command gets beside torch's own variables


class ExecOptions(Record):
    """Options of `hpcddp exec`. `nodes` and `ranks_per_node`: 0 unless the command makes the ranks of a node."""

    nodes: int = 0
    ranks_per_node: int = 0
    global_batch: int | None = None
    max_micro_batch: int | None = None
    gpus_per_node: int = 0


def _parse_options(texts: Mapping[str, str | None]) -> ExecOptions:
    """The options as numbers. RequestError for one that is none, or for half of a pair."""
    from hpcddp.units import parse_count

    given = {name: parse_count(text, f"--{name.replace('_', '-')}") for name, text in texts.items() if text is not None}
    if ("nodes" in given) != ("ranks_per_node" in given):
        raise RequestError("--nodes and --ranks-per-node belong together", "--nodes N --ranks-per-node R")
    return ExecOptions(**given)


def refuse_missing_gpus(
    command: list[str], env: Mapping[str, str], info: RankInfo, hostname: str, each: int
) -> dict[str, str]:
    """The variable by which the program knows that each node has GPUs; none where it is to train on CPUs.

    LaunchError where it starts Python or ranks that could find no GPU. Where others start Python, the guard checks."""
    from hpcddp.ranks.device import GPUS_PER_NODE, asks_for_cpu, no_gpu, why_no_accelerator

    if not each or asks_for_cpu(env):
        return {}
    from hpcddp.ranks.launch_commands import starts_python_or_ranks

    if starts_python_or_ranks(command) and (why := why_no_accelerator(env)):
        raise no_gpu(f"rank {info.rank} on {hostname} sees none", each, why)
    return {GPUS_PER_NODE: str(each)}


def further_variables(
    command: list[str], env: Mapping[str, str], launch: Launch, options: ExecOptions
) -> dict[str, str]:
    """Variables for frameworks, or for the node agent, and for the guard against ranks that never meet."""
    from hpcddp.ranks.device import GPUS_PER_NODE
    from hpcddp.ranks.frameworks import framework_variables, node_agent_variables

    info = launch.info
    if options.nodes:
        if info.world_size != options.nodes or info.local_world_size not in (None, 1):
            raise LaunchError(
                f"the command makes the ranks of each of {options.nodes} nodes, but {info.launcher} started it"
                f" {info.world_size} times ({info.local_world_size or '?'} on this node)",
                "start it once per node, or use a script of `hpcddp render`",
            )
        from hpcddp.ranks.launch_commands import find_node_agent

        found = find_node_agent(command)
        node_agent = found[1].node_agent if found else NODE_AGENTS[0]
        reads = found[1].reads if found else LAUNCHERS[node_agent].reads
        # WORLD_SIZE counts nodes here; the ranks that a node agent makes get one of their own, and these marks
        watched = {}
        if found:
            ranks = str(options.nodes * (options.ranks_per_node or 1))
            watched = _guard(env) | {guard.RANK_MARKS: " ".join(LAUNCHERS[node_agent].marks), guard.AGENT_RANKS: ranks}
        return node_agent_variables(reads, env, info, options.nodes, options.ranks_per_node) | watched
    if info.world_size == 1:
        return _guard(env) if GPUS_PER_NODE in env or env.get("HPCDDP_LOG_RANKS") == "1" else {}
    from hpcddp.ranks.device import count_visible_gpus, why_no_accelerator

    gpus = count_visible_gpus(env)
    return framework_variables(env, launch, gpus=gpus, cpu_only=bool(why_no_accelerator(env))) | _guard(env)


def _guard(env: Mapping[str, str]) -> dict[str, str]:
    found = {"PYTHONPATH": os.pathsep.join(filter(None, (*guard.__path__, env.get("PYTHONPATH", ""))))}
    node_agent = next((row for row in map(LAUNCHERS.__getitem__, NODE_AGENTS) if row.agent_store), None)
    if node_agent is not None:
        found[guard.AGENT_NAMES] = " ".join((node_agent.name, node_agent.marks[0], node_agent.num_nodes))
    return found


def fill_command(command: list[str], env: Mapping[str, str], info: RankInfo, options: ExecOptions) -> list[str]:
    """The command with this rank's values for its placeholders."""
    if not any("{" in word for word in command):
        return command
    from hpcddp.ranks.frameworks import count_nodes
    from hpcddp.sweep import batch_numbers, fill_placeholders

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
