"""Mistakes in the directives, whatever the commands are."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import pairwise

from hpcddp.errors import HpcddpError
from hpcddp.lint.directives import chunks, numbered, parse_slurm_words
from hpcddp.lint.launches import (
    LaunchCommand,
    count_processes,
    per_node,
    rank_maker,
    torchrun_option,
    torchrun_words,
    trains,
)
from hpcddp.lint.script import PREFIXES, Problem, Script
from hpcddp.schedulers.directive_rules import DirectiveOption, find_clashes, full_name, refused_together
from hpcddp.schedulers.registry import find_scheduler, scripted_schedulers
from hpcddp.script.site import check_limits
from hpcddp.units import format_count, parse_walltime

# Options that mean something when they stand several times.
_SEVERAL = {"-v", "-l", "-W depend", "-hard", "-soft", "-m", "-M", "--dependency", "--switches"}
# Names that PBS gives to the queues of advance, standing and maintenance reservations.
_PBS_RESERVATION = re.compile(r"[RSM]\d+")

_CLOCK = "hours:minutes:seconds, such as 12:00:00"


def refused(script: Script) -> Iterator[Problem]:
    """Options that the scheduler's own parser refuses."""
    command = find_scheduler(script.scheduler).commands.submit[0]
    for line, why, instead in script.directives.refusals:
        yield Problem(line, f"{command} refuses the script: {why}", instead)


def refused_options(script: Script) -> Iterator[Problem]:
    """D4: options that the submit command refuses together, or without another one. Torque's rules are not known."""
    row = find_scheduler(script.scheduler)
    submit = row.commands.submit[0]
    lines = {DirectiveOption(o.name, o.value, o.text): o.line for o in script.directives.options}
    for clash in find_clashes(row.directives, list(lines)):
        texts = " and ".join(dict.fromkeys(option.text for option in clash.options))
        instead, why = "one of them", clash.why.removeprefix("refuses options that")
        if clash.needs:
            instead, why = f"{clash.needs[0]}=… beside it", f": {submit} {clash.why}"
        if clash.is_refused and not script.directives.torque:
            yield Problem(lines[clash.options[-1]], f"{submit} refuses the script: {texts}{why}", instead)
    if script.scheduler == "slurm":
        yield from _refused_steps(script)


def _refused_steps(script: Script) -> Iterator[Problem]:
    """Options of srun against each other and against the script's, which srun gets as variables; its memory is its
    own."""
    rules = find_scheduler("slurm").directives
    inherited = [o for o in script.directives.options if not o.name.startswith("--mem")]
    for launch in script.launches:
        if launch.launcher == "srun":
            of_step, _ = parse_slurm_words([(word, launch.command.line) for word in launch.options])
            names = {o.name for o in of_step}
            options = [*(o for o in inherited if o.name not in names), *of_step]
            for first, second, why in refused_together(rules, [(o.name, o.value) for o in options]):
                instead_of = (
                    options[second].name == "--cpus-per-task" and options[first] not in of_step
                )  # of --cpus-per-gpu
                if options[second] in of_step and "exclude" in why and not instead_of:
                    both = f"{options[first].text} and {options[second].text}"
                    yield Problem(launch.command.line, f"srun refuses to start: {both} {why}", "one of them")


def not_read(script: Script) -> Iterator[Problem]:
    """M7: directives behind the first command, and what sbatch takes for comments."""
    prefix = PREFIXES[script.scheduler]
    lines = dict(numbered(script.text))
    for line in script.directives.unread:
        why = "is indented: a comment to sbatch"
        if 0 < script.directives.command_line < line:
            why = f"stands behind the first command (line {script.directives.command_line}) and is not read"
        yield Problem(line, f"{lines[line].strip()!r} {why}", "directives directly behind #!/bin/bash, at column 0")
    for line, text in lines.items():
        if re.match(rf"{prefix.lower()}\s+-", text) and prefix.lower() != prefix:
            yield Problem(line, f"{text.strip()!r} is a comment: the prefix is {prefix}", f"{prefix} …")


def other_scheduler(script: Script) -> Iterator[Problem]:
    """M34: directives of another scheduler."""
    for row in scripted_schedulers():
        name, prefix = row.name, row.directives.prefix
        if name == script.scheduler or not prefix:
            continue
        for line, text in numbered(script.text):
            if re.match(rf"\s*{re.escape(prefix)}\s*-", text):
                translated = (name, script.scheduler) == ("pbs", "slurm")
                whose = "read by sbatch, too, and translated" if translated else f"a comment to {script.scheduler}"
                yield Problem(line, f"{text.strip()!r} is {whose}", f"{PREFIXES[script.scheduler]} lines only")


def twice(script: Script) -> Iterator[Problem]:
    """M9: an option that stands twice with different values; only one counts."""
    first: dict[str, tuple[int, str]] = {}
    for name, value, line in script.directives.options:
        if name in _SEVERAL or name.startswith("-v"):
            continue
        if name in first and first[name][1] != value:
            first_counts = script.scheduler == "pbs" and name.startswith("-l ")
            counted = first[name][1] if first_counts else value
            what = f"{name} stands twice (line {first[name][0]} too); only {counted!r} counts"
            yield Problem(line, what, f"one {name}")
        first.setdefault(name, (line, value))


def output_folder(script: Script) -> Iterator[Problem]:
    """M8: the folder of the job's output. No scheduler makes it, and PBS expands nothing in its name."""
    for option in script.directives.all(*find_scheduler(script.scheduler).directives.outputs):
        path = option.value.split(":", 1)[-1] if script.scheduler == "pbs" else option.value
        literal = re.search(r"[$~]", path)
        if literal:
            what = f"{literal[0]} in {path!r} is not expanded: it is a letter of the name"
            yield Problem(option.line, what, "a plain path")
            continue
        folder = os.path.dirname(path)
        if not folder or re.search(r"%|\^array", folder) or script.folder_exists(folder):
            continue
        if not folder.startswith("/") or script.folder_exists(os.path.dirname(folder)):
            what = f"the folder {folder!r} does not exist: the output is lost, or the job is held"
            yield Problem(option.line, what, f"mkdir -p {folder} before submitting, or a file in the folder of the job")


def walltime(script: Script) -> Iterator[Problem]:
    """M33: run times that a scheduler refuses or misreads."""
    option = script.request.walltime
    if option is None or _is_time(option.value, script.scheduler):
        return
    many = " with four fields" if option.value.count(":") == 3 else ""
    what = f"{option.value!r} is no run time{many}: {script.scheduler} refuses it or misreads it"
    if script.scheduler == "pbs":
        what = f"qsub refuses the script: {option.text}: no run time{many}"
    yield Problem(option.line, what, _CLOCK)


def short_walltime(script: Script) -> Iterator[Problem]:
    """M33: run times that may be meant otherwise: two fields are minutes and seconds, an empty one is none."""
    option = script.request.walltime
    if option is None or not _is_time(option.value, script.scheduler):
        return
    fields = option.value.split(":")
    if len(fields) == 2 and "-" not in option.value:
        read = f"{format_count(int(fields[0]), 'minute')} {format_count(int(fields[1] or 0), 'second')}"
        yield Problem(option.line, f"{option.value} is {read}, not hours", _CLOCK)
    elif not option.value.strip():
        yield Problem(option.line, "an empty walltime is none: the queue's default or its maximum holds", _CLOCK)


def _is_time(value: str, scheduler: str) -> bool:
    if scheduler == "slurm":
        return bool(re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}|infinite|unlimited", value, re.IGNORECASE))
    return bool(re.fullmatch(r"\s*(\d+(:\d+){0,2}(\.\d*)?|\d+(:\d+)?:)?", value, re.ASCII))


def requeue(script: Script) -> Iterator[Problem]:
    """M29: whether a job that lost its node starts again is the site's choice unless the script says it."""
    says, text = ("--requeue", "--no-requeue"), "#SBATCH --no-requeue"
    if script.scheduler == "pbs":
        says, text = ("-r", "-r"), "#PBS -r n"
    if script.directives.options and not script.directives.get(*says):
        yield Problem(1, "whether the job may start a second time is not said, and differs by site", text)


def rejected(script: Script) -> Iterator[Problem]:
    """M23: options that this site refuses, with the whole script."""
    site = script.site
    if site is None:
        return
    rules = find_scheduler(script.scheduler).directives
    rejects = {full_name(rules, one) for one in site.rejects}
    for option in script.directives.options:
        if {option.name, f"{option.name}={option.value}"} & rejects:
            source = site.source(site.cited.get("rejects", ""))
            yield Problem(option.line, f"site {site.name} refuses {option.name} ({source})", "leave it out")


def limits(script: Script) -> Iterator[Problem]:
    """M5 and M6: what the site's queue takes, and the account it wants."""
    request, site = script.request, script.site
    if site is None or not script.directives.options:
        return
    queue = script.queue_name
    account = site.account_of(queue)
    if account.required and not request.account:
        yield Problem(1, f"site {site.name} takes no job without an account", f"{account.option} NAME".strip())
    if site.scheduler == "pbs" and queue and _PBS_RESERVATION.fullmatch(queue):
        return  # a reservation is a queue, with limits of its own
    if site.queues and queue and queue not in site.queues:
        line = request.queue.line if request.queue else 1
        yield Problem(line, f"queue {queue!r} is none of site {site.name}'s", f"one of {', '.join(site.queues)}")
    elif queue in site.queues and request.nodes and request.size:
        gpus = request.nodes * (request.gpus_per_node or script.queue.gpus or 0)
        try:
            seconds = parse_walltime(request.walltime.value, "walltime") if request.walltime else site.walltime_s
            check_limits(site, queue, request.nodes, seconds or 1, gpus)
        except HpcddpError as e:
            yield Problem(request.size.line, e.message, e.hint)


# Options of mpirun that say how many processes, or how many on each node.
_COUNTS = ("-np", "--np", "-n", "--n", "-c", "-npernode", "--npernode", "-N", "-ppn", "--ppn", "-perhost", "--map-by",
           "-map-by", "-pernode", "--pernode", "-H", "-host", "--host")  # fmt: skip


def no_mpiprocs(script: Script) -> Iterator[Problem]:
    """M1: PBS gives a chunk one slot unless `mpiprocs` says otherwise."""
    select = script.directives.get("-l select")
    if script.scheduler != "pbs" or select is None or "mpiprocs" in select.value or not chunks(select.value):
        return
    for launch in _mpi(script):
        wanted = count_processes(launch)
        other_hosts = launch.has("-H", "-host", "--host", "--oversubscribe") or _other_hostfile(launch)
        if other_hosts or per_node(launch, script.request) == 1 or wanted == script.request.nodes:
            continue
        if wanted is None and not launch.has("-np", "-n", "-ppn", "-npernode", "--map-by", "-map-by"):
            continue  # one process per chunk, and that may be what is wanted
        what = f"select={select.value} has no mpiprocs: one slot per chunk, too few for line {launch.command.line}"
        yield Problem(select.line, what, f"select={script.request.nodes}:…:mpiprocs=RANKS_PER_NODE")
        return


def no_ompthreads(script: Script) -> Iterator[Problem]:
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
        what = f"OMP_NUM_THREADS is never set: PBS gives every rank of a node {each}"
        yield Problem(select.line, what, "…:ompthreads=THREADS in the select, and export OMP_NUM_THREADS=THREADS")


def packed(script: Script) -> Iterator[Problem]:
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
        what = f"{request.nodes} chunks are not {request.nodes} nodes: PBS packs them onto one host while they fit"
        yield Problem(select.line, what, "#PBS -l place=scatter")


def first_nodes_only(script: Script) -> Iterator[Problem]:
    """A4: mpirun fills a host's slots before it goes on: `mpiprocs=192` and `-np 32` is one busy node."""
    request = script.request
    if script.scheduler != "pbs" or not request.slots or not request.nodes:
        return
    for launch in _mpi(script):
        wanted = count_processes(launch)
        if wanted is None or launch.is_placed or _other_hostfile(launch):
            continue
        used = -(-wanted // request.slots)
        if used < request.nodes:
            what = f"{wanted} ranks fill the first {used} of {request.nodes} nodes: the nodefile lists each node"
            what += f" {request.slots} times (mpiprocs={request.slots})"
            right = f"mpiprocs={-(-wanted // request.nodes)}, and --map-by ppr:{-(-wanted // request.nodes)}:node"
            yield Problem(launch.command.line, what, right)


def rank_per_slot(script: Script) -> Iterator[Problem]:
    """A4: mpirun without a count starts a rank for each line of the nodefile: with `mpiprocs=192`, 192 on each node."""
    slots, gpus = script.request.slots, script.request.gpus_per_node or script.queue.gpus
    most = gpus or 16  # no node that is known has more
    if script.scheduler != "pbs" or not slots or slots <= most:
        return
    for launch in _mpi(script):
        counted = launch.has(*_COUNTS) or _other_hostfile(launch)
        if not counted and (torchrun_words(launch.started) or any(trains(launch.started[i:]) for i in range(3))):
            has = f"and the node {gpus} GPUs" if gpus else "more than a node has GPUs"
            what = f"{launch.launcher} without -np starts a rank for each line of the nodefile: {slots} on each node"
            what += f" (mpiprocs={slots}), {has}"
            right = f"mpiprocs={gpus or 'GPUS'}, and -np RANKS --map-by ppr:{gpus or 'GPUS'}:node"
            yield Problem(launch.command.line, what, right)


def idle_nodes(script: Script) -> Iterator[Problem]:
    """M10: several nodes, and nothing that starts processes on the others."""
    size = script.request.size
    if size is None or not script.several_nodes() or script.reaches():
        return
    for command in script.commands:
        torchrun = torchrun_words(command.words)
        if not torchrun and not trains(command.words):
            continue
        what = "torchrun" if torchrun else command.program
        what = f"{what} runs on the first of {script.request.nodes} nodes only, and nothing starts it on the others"
        yield Problem(command.line, what, "srun … (Slurm) or mpirun … (PBS) in front of it")
        return


def two_launchers(script: Script) -> Iterator[Problem]:
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
            yield Problem(launch.command.line, what, right)


def no_cpus_for_srun(script: Script) -> Iterator[Problem]:
    """M24: Slurm 22.05 to 23.02, whose srun does not take --cpus-per-task from the job."""
    if script.scheduler != "slurm" or not script.request.cpus_per_task or script.assigned("SRUN_CPUS_PER_TASK"):
        return
    threads = script.request.cpus_per_task
    for launch in script.launches:
        takes_them = launch.launcher == "srun" and launch.started and not launch.command.captured
        if takes_them and launch.option("-c", "--cpus-per-task") is None:
            what = f"in Slurm 22.05 to 23.02 srun does not take over the job's --cpus-per-task={threads}"
            yield Problem(launch.command.line, what, f"srun --cpus-per-task={threads} …")


def too_many_cpus(script: Script) -> Iterator[Problem]:
    """M25: more CPUs per node than the queue's node has."""
    wanted, there, size = script.request.cpus_per_node, script.queue.cpus, script.request.size
    if wanted and there and wanted > there and size and script.site:
        what = f"{wanted} CPUs per node are asked for, and a node has {there}"
        what += f" ({script.site.source(script.queue.source)}): the job never runs"
        yield Problem(size.line, what, f"{there} at most")


def gpu_numbers(script: Script) -> Iterator[Problem]:
    """M16: CUDA_VISIBLE_DEVICES with numbers that a node does not have."""
    gpus = script.request.gpus_per_node or script.queue.gpus
    for command, value in script.assigned("CUDA_VISIBLE_DEVICES"):
        numbers = [int(n) for n in value.split(",") if n.strip().isdecimal()] if re.fullmatch(r"[\d, ]+", value) else []
        over_nodes = re.search(r"seq\b.*\$\{?\w*NODE\w*\}?\s*\*|seq\b.*\*\s*\$?\{?\w*NODE", value, re.IGNORECASE)
        if (gpus and numbers and max(numbers) >= gpus) or over_nodes:
            has = f"a node has 0 to {gpus - 1}" if gpus else "numbers count the devices of one node"
            yield Problem(command.line, f"CUDA_VISIBLE_DEVICES={value}: {has}", "leave it to the scheduler")


def _mpi(script: Script) -> list[LaunchCommand]:
    return [launch for launch in script.launches if launch.launcher != "srun" and launch.started]


def _other_hostfile(launch: LaunchCommand) -> bool:
    file = launch.option("-hostfile", "--hostfile", "-machinefile", "--machinefile", "-f")
    return file is not None and "PBS_NODEFILE" not in file
