"""Mistakes in how much is asked for, and how the processes are laid on it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from hpcddp.lint.finding import Said
from hpcddp.lint.launches import LaunchCommand, count, per_node, rank_maker, torchrun_option, torchrun_words, trains
from hpcddp.lint.pbs import chunks
from hpcddp.lint.script import Script

# Options of mpirun that say how many processes, or how many on each node.
_COUNTS = ("-np", "--np", "-n", "--n", "-c", "-npernode", "--npernode", "-N", "-ppn", "--ppn", "-perhost", "--map-by",
           "-map-by", "-pernode", "--pernode", "-H", "-host", "--host")  # fmt: skip


def no_mpiprocs(script: Script) -> Iterator[Said]:
    """M1: PBS gives a chunk one slot unless `mpiprocs` says otherwise."""
    select = script.directives.get("-l select")
    if script.scheduler != "pbs" or select is None or "mpiprocs" in select.value or not chunks(select.value):
        return
    for launch in _mpi(script):
        wanted = count(launch)
        own_hosts = launch.has("-H", "-host", "--host", "--oversubscribe") or _other_hostfile(launch)
        if own_hosts or per_node(launch, script.request) == 1 or wanted == script.request.nodes:
            continue
        if wanted is None and not launch.has("-np", "-n", "-ppn", "-npernode", "--map-by", "-map-by"):
            continue  # one process per chunk, and that may be what is wanted
        yield Said(
            select.line,
            f"select={select.value} has no mpiprocs: one slot per chunk, too few for line {launch.command.line}",
            f"select={script.request.nodes}:…:mpiprocs=RANKS_PER_NODE",
        )
        return


def no_ompthreads(script: Script) -> Iterator[Said]:
    """M3: PBS exports OMP_NUM_THREADS = ncpus of the whole chunk, for each rank."""
    select = script.directives.get("-l select")
    if script.scheduler != "pbs" or select is None or "ompthreads" in select.value:
        return
    several = (script.request.slots or 1) > 1 or any(
        (torchrun_option(torchrun_words(c.words), "nproc-per-node") or "1") != "1" for c in script.commands
    )
    if several and not script.assigned("OMP_NUM_THREADS") and "-x OMP_NUM_THREADS=" not in script.code:
        cpus = script.request.cpus_per_node or script.queue.cpus
        each = f"all {cpus} CPUs" if cpus else "all of its CPUs"
        yield Said(
            select.line,
            f"OMP_NUM_THREADS is never set: PBS gives every rank of a node {each}",
            "…:ompthreads=THREADS in the select, and export OMP_NUM_THREADS=THREADS",
        )


def packed(script: Script) -> Iterator[Said]:
    """M4: without a placement PBS puts chunks onto one host as long as they fit."""
    select = script.directives.get("-l select")
    if script.scheduler != "pbs" or select is None or script.directives.get("-l place") or not script.several_nodes():
        return
    request, queue = script.request, script.queue
    if script.queue.exclusive or (script.site and not script.site.chunk):
        return  # the queue decides what a chunk is: whole nodes
    fills = (request.cpus_per_node or 0) * 2 > (queue.cpus or 10**9) or (
        (request.gpus_per_node or 0) * 2 > (queue.gpus or 10**9)
    )
    if not fills and (request.cpus_per_node or request.gpus_per_node or not request.queue):
        yield Said(
            select.line,
            f"{request.nodes} chunks are not {request.nodes} nodes: PBS packs them onto one host while they fit",
            "#PBS -l place=scatter",
        )


def first_nodes_only(script: Script) -> Iterator[Said]:
    """A4: mpirun fills a host's slots before it goes on: `mpiprocs=192` and `-np 32` is one busy node."""
    request = script.request
    if script.scheduler != "pbs" or not request.slots or not request.nodes:
        return
    for launch in _mpi(script):
        wanted = count(launch)
        if wanted is None or launch.is_placed or _other_hostfile(launch):
            continue
        used = -(-wanted // request.slots)
        if used < request.nodes:
            yield Said(
                launch.command.line,
                f"{wanted} ranks fill the first {used} of {request.nodes} nodes: the nodefile lists each node"
                f" {request.slots} times (mpiprocs={request.slots})",
                f"mpiprocs={-(-wanted // request.nodes)}, and --map-by ppr:{-(-wanted // request.nodes)}:node",
            )


def rank_per_slot(script: Script) -> Iterator[Said]:
    """A4: mpirun without a count starts a rank for each line of the nodefile: with `mpiprocs=192`, 192 on each node."""
    slots, gpus = script.request.slots, script.request.gpus_per_node or script.queue.gpus
    most = gpus or 16  # no node that is known has more
    if script.scheduler != "pbs" or not slots or slots <= most:
        return
    for launch in _mpi(script):
        counted = launch.has(*_COUNTS) or _other_hostfile(launch)
        if not counted and (torchrun_words(launch.started) or any(trains(launch.started[i:]) for i in range(3))):
            has = f"and the node {gpus} GPUs" if gpus else "more than a node has GPUs"
            yield Said(
                launch.command.line,
                f"{launch.launcher} without -np starts a rank for each line of the nodefile: {slots} on each node"
                f" (mpiprocs={slots}), {has}",
                f"mpiprocs={gpus or 'GPUS'}, and -np RANKS --map-by ppr:{gpus or 'GPUS'}:node",
            )


def idle_nodes(script: Script) -> Iterator[Said]:
    """M10: several nodes, and nothing that starts processes on the others."""
    size = script.request.size
    if size is None or not script.several_nodes() or script.reaches():
        return
    for command in script.commands:
        torchrun = torchrun_words(command.words)
        if not torchrun and not trains(command.words):
            continue
        what = "torchrun" if torchrun else command.program
        yield Said(
            command.line,
            f"{what} runs on the first of {script.request.nodes} nodes only, and nothing starts it on the others",
            "srun … (Slurm) or mpirun … (PBS) in front of it",
        )
        return


def two_launchers(script: Script) -> Iterator[Said]:
    """M15: torchrun, accelerate or deepspeed under a launcher that starts one process per GPU already."""
    for launch in script.launches:
        maker = rank_maker(launch.started)
        each = per_node(launch, script.request)
        if not maker or each is None or each < 2:
            continue
        options = dict(pairwise((*" ".join(maker).replace("=", " ").replace("_", "-").split(), "")))
        counts = ("--nproc-per-node", "--num-processes", "--num-gpus")
        workers = next((options[name] for name in counts if name in options), "1" if torchrun_words(maker) else "")
        of_task = script.directives.get("--gpus-per-task")
        if workers != "1" and not (of_task and of_task.value.rpartition(":")[2] == workers):
            name = "torchrun" if torchrun_words(maker) else maker[0].rsplit("/", 1)[-1]
            number = f"{workers} workers" if workers else "one process per GPU"
            what = f"{launch.launcher} starts {each} processes of {name} on each node, and each of them {number}"
            right = f"one per node ({launch.launcher} with 1 process per node), or no {name}"
            yield Said(launch.command.line, what, right)


def no_cpus_for_srun(script: Script) -> Iterator[Said]:
    """M24: Slurm 22.05 to 23.02, whose srun does not take --cpus-per-task from the job."""
    if script.scheduler != "slurm" or not script.request.cpus_per_task or script.assigned("SRUN_CPUS_PER_TASK"):
        return
    threads = script.request.cpus_per_task
    for launch in script.launches:
        takes_them = launch.launcher == "srun" and launch.started and not launch.command.captured
        if takes_them and launch.option("-c", "--cpus-per-task") is None:
            what = f"in Slurm 22.05 to 23.02 srun does not take over the job's --cpus-per-task={threads}"
            yield Said(launch.command.line, what, f"srun --cpus-per-task={threads} …")


def too_many_cpus(script: Script) -> Iterator[Said]:
    """M25: more CPUs per node than the queue's node has."""
    wanted, there, size = script.request.cpus_per_node, script.queue.cpus, script.request.size
    if wanted and there and wanted > there and size and script.site:
        yield Said(
            size.line,
            f"{wanted} CPUs per node are asked for, and a node has {there}"
            f" ({script.site.source(script.queue.source)}): the job never runs",
            f"{there} at most",
        )


def gpu_numbers(script: Script) -> Iterator[Said]:
    """M16: CUDA_VISIBLE_DEVICES with numbers that a node does not have."""
    gpus = script.request.gpus_per_node or script.queue.gpus
    for command, value in script.assigned("CUDA_VISIBLE_DEVICES"):
        numbers = [int(n) for n in value.split(",") if n.strip().isdecimal()] if re.fullmatch(r"[\d, ]+", value) else []
        over_nodes = re.search(r"seq\b.*\$\{?\w*NODE\w*\}?\s*\*|seq\b.*\*\s*\$?\{?\w*NODE", value, re.IGNORECASE)
        if (gpus and numbers and max(numbers) >= gpus) or over_nodes:
            has = f"a node has 0 to {gpus - 1}" if gpus else "numbers count the devices of one node"
            yield Said(command.line, f"CUDA_VISIBLE_DEVICES={value}: {has}", "leave it to the scheduler")


def _mpi(script: Script) -> list[LaunchCommand]:
    return [launch for launch in script.launches if launch.launcher != "srun" and launch.started]


def _other_hostfile(launch: LaunchCommand) -> bool:
    file = launch.option("-hostfile", "--hostfile", "-machinefile", "--machinefile", "-f")
    return file is not None and "PBS_NODEFILE" not in file
