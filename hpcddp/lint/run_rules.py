"""Mistakes in the commands: the rendezvous, counts, what reaches the other nodes."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise

from hpcddp.lint.directives import numbered
from hpcddp.lint.launches import expand, per_node, rank_maker, torchrun_option, torchrun_words, trains
from hpcddp.lint.script import Problem, Script, unix_lines
from hpcddp.lint.shell import REACHES, Command, find_open_document
from hpcddp.ranks.launch_commands import find_node_agent
from hpcddp.ranks.launchers import LAUNCHERS
from hpcddp.ranks.rendezvous import port_in_shell

_NODE_COUNT = re.compile(r"node|host|machine", re.IGNORECASE)
_RANK_COUNT = re.compile(r"rank|slot|proc|gpu|task|world|size_?total|^np$", re.IGNORECASE)
_SUBMIT_HOSTS = {"SLURM_SUBMIT_HOST", "PBS_O_HOST", "SGE_O_HOST"}
_FOREIGN_HOST = re.compile(rf"\$\{{?({'|'.join(_SUBMIT_HOSTS)}|SLURM_LAUNCH_NODE_IPADDR|SLURM_SRUN_COMM_HOST)\b")
_ADDRESS = re.compile(
    r"MASTER|ADDR|HEAD|MAIN|RDZV|ENDPOINT|INIT.METHOD|DIST.URL|(^|_)HOST$|IP$|SERVER|COORD|URL|FIRST|ROOT|STORE|LEADER",
    re.IGNORECASE,
)
#: The variables by which a rank knows its place: launchers set them in what they start.
_ROWS = [row for name, row in LAUNCHERS.items() if name not in {"env", "torchrun"}]
_OF_RANK = {getattr(row, number) for row in _ROWS for number in ("rank", "local_rank", "node_rank")} - {""}
_OF_RANK |= {"OMPI_COMM_WORLD_NODE_RANK", "PMI_LOCAL_RANK", "PBS_TASKNUM", "PBS_NODENUM", "PBS_VNODENUM"}
_HERE = re.compile(r"(localhost|127\.0\.0\.1|\[?::1\]?)(:.*)?")
_OURS = "hpcddp exec finds it"
_C10D = re.compile(r"--rdzv[-_]backend[=\s]+['\"]?(?!static|\$)\w")
_NODE_RANK = re.compile(r"--(node|machine)[-_]rank[=\s]+\S+")
# The names of variables and options by which ranks meet, and values that are others each time.
_MEETING = re.compile(r"PORT$|RDZV_?ID$|^--?(master|main[-_]process)[-_]port$|^--rdzv[-_](endpoint|id)$")
_DRAWN = re.compile(r"RANDOM|\bshuf\b|\$\$|random|socket|free_?port|uuidgen")
_HOST_NAME = re.compile(r"\$\{?(HOSTNAME|SLURMD_NODENAME)\b|\$\(\s*hostname\b|`\s*hostname\b")
# Variables that schedulers, launchers, modules and login shells set.
_GIVEN = re.compile(
    r"(PBS|SLURM|SGE|PE|OMPI|OMP|PMI|MPI|PALS|NCCL|CUDA|ROCM|CONDA|LSB|FLUX|PJM|COBALT)_?\w*"
    r"|N(SLOTS|HOSTS|QUEUES|CPUS|GPUS)|JOB_(ID|NAME)|TMPDIR|HOME|USER|LOGNAME|PWD|PATH|HOSTNAME|SHELL|RANDOM|SECONDS"
    r"|\w+_(HOME|ROOT|DIR|PATH|BASE|PREFIX|SUBMIT_DIR)|SCRATCH|WORK|PROJECT|GROUP_HOME|EPOCHSECONDS|UID|PPID"
)
_COUNT_OPTIONS = {"-np", "-n", "--np", "--ntasks", "-ppn", "-npernode", "-N", "--nodes", "--nnodes", "--nproc-per-node",
                  "--nproc_per_node", "--num_processes", "--num-processes", "--ntasks-per-node", "--master_addr",
                  "--master-addr", "--master_port", "--master-port", "--rdzv_endpoint", "--rdzv-endpoint"}  # fmt: skip


def lines_are_no_nodes(script: Script) -> Iterator[Problem]:
    """M2: the nodefile has one line per slot, not per node."""
    select = script.directives.get("-l select")
    one_each = select is not None and "mpiprocs" not in select.value and script.scheduler == "pbs"
    if one_each or script.request.slots == 1:
        return
    for command in script.commands:
        for name, value in command.sets:
            counts = re.search(r"\bwc\b.*-l", value, re.DOTALL) and "PBS_NODEFILE" in value
            unique = re.search(r"sort\s+(-\w+\s+)*-\w*u|\buniq\b|awk", value)
            if counts and not unique and _NODE_COUNT.search(name) and not _RANK_COUNT.search(name):
                times = f"{script.request.slots} times" if script.request.slots else "as often as it has slots"
                what = f"{name} counts the lines of the nodefile, which lists each node {times}"
                yield Problem(command.line, what, f'{name}=$(sort -u "$PBS_NODEFILE" | wc -l)')


def hostname_reads_nothing(script: Script) -> Iterator[Problem]:
    """M11: hostname does not read its input."""
    for command in script.commands:
        for found in re.finditer(r"\|\s*hostname\b[^|;)]*", command.text):
            what = f"{found[0].strip()!r}: hostname ignores its input and names the host that it runs on"
            yield Problem(command.line, what, 'read -r MASTER_ADDR < "$PBS_NODEFILE"')
            break


def hostname_of_each_task(script: Script) -> Iterator[Problem]:
    """M12: a MASTER_ADDR that each task works out for itself is each task's own host."""
    for command, value in script.assigned("MASTER_ADDR"):
        if command.launched and _HOST_NAME.search(_late(command, value)):
            what = "MASTER_ADDR is worked out in each task: every task takes its own host for the master"
            yield Problem(command.line, what, "export MASTER_ADDR in the script, before the launcher")


def localhost_for_several_nodes(script: Script) -> Iterator[Problem]:
    """A9: each node's processes meet on their own host: as many trainings as nodes, or none."""
    if not script.several_nodes() or not script.launches:
        return
    for command in script.commands:
        launch = script.launch_of(command)
        if launch and not script.on_several_nodes(launch):
            continue
        found = [f"{n}={v}" for n, v in command.sets if n == "MASTER_ADDR" and _HERE.fullmatch(v)]
        agent = torchrun_words(command.words)
        for name in ("master-addr", "rdzv-endpoint"):
            value = torchrun_option(agent, name)
            found += [f"--{name} {value}"] if value and _HERE.fullmatch(value) else []
        if found:
            what = f"{found[0]} on {script.request.nodes} nodes: each node's processes look on their own host"
            yield Problem(command.line, what, f"export MASTER_ADDR=FIRST_HOST; {_OURS}")


def job_id_in_port(script: Script) -> Iterator[Problem]:
    """M13: a PBS job id is no number: `1234[5].pbs1`, and 0189 is bad octal. Slurm's is a number."""
    stripped = re.compile(r"10#|tr -|(//|%%)\[[!^]0-9\]")
    if not script.directives.get("-J", "-t"):  # the number before the first point, unless it is cut again
        stripped = re.compile(rf"{stripped.pattern}|^(?!.*(tail -c|: -))(.*%%\.\*|.*cut -d *['\"]?\.)")
    for line, text in dict.fromkeys((command.line, command.text) for command in script.commands):
        if script.scheduler != "pbs" or ("PBS_JOBID" not in text and "JOB_ID" not in text):
            continue
        sums = re.findall(r"\$\(\((.*?)\)\)", text) + re.findall(r"\bexpr\b(.*)", text)
        if any("JOB" in s and not stripped.search(s) for s in sums):
            what = "a number is worked out from the job id as it stands: 1234[5].pbs1 (an array) and 0189 break it"
            yield Problem(line, what, f"strip it to digits and say base 10: {port_in_shell('10#${id//[!0-9]/}')}")


def gpu_aware_mpi(script: Script) -> Iterator[Problem]:
    """M20: GPU-aware MPI beside NCCL can deadlock."""
    uses_nccl = re.search(r"\bNCCL_|\bMASTER_ADDR\b|torchrun|torch\.distributed", script.code)
    for command, value in script.assigned("MPICH_GPU_SUPPORT_ENABLED"):
        if value == "1" and uses_nccl:
            what = "GPU-aware MPI is switched on beside NCCL: both drive the GPUs, and may deadlock"
            yield Problem(command.line, what, "export MPICH_GPU_SUPPORT_ENABLED=0")


def master_addr_stays_here(script: Script) -> Iterator[Problem]:
    """A1: MASTER_ADDR that the ranks on other nodes never see."""
    python = re.compile(r"(.*/)?python[\d.]*|.*\.py").fullmatch
    launches = [x for x in script.launches if any(map(python, x.started)) and not torchrun_words(x.started)]
    if not script.several_nodes() or not launches or any("hpcddp" in w for x in launches for w in x.started):
        return
    assigned = [c for c, _ in script.assigned("MASTER_ADDR") if not c.launched]
    forwarded = "MASTER_ADDR" in "".join(w for x in launches for w in (*x.options, *x.started))
    exports = re.search(r"\b(export|declare -x)\b[^\n;]*\bMASTER_ADDR\b|set -a\b|allexport", script.code)
    by_argument = re.search(r"--?(master[-_]addr|dist[-_]url|init[-_]method|rdzv)|tcp://|file://", script.code)
    if forwarded or by_argument or any(c.launched for c, _ in script.assigned("MASTER_ADDR")):
        return
    last = launches[-1]
    if not assigned and not exports:
        what = "MASTER_ADDR is never set: unless the program finds it, ranks look for rank 0 on their own host"
        yield Problem(last.command.line, what, f"export MASTER_ADDR=FIRST_HOST, forwarded to every node; {_OURS}")
    elif not exports and not last.command.sets:
        line = assigned[-1].line
        yield Problem(line, "MASTER_ADDR is set and never exported: no rank sees it", "export MASTER_ADDR")
    elif exports and last.is_openmpi and script.scheduler != "slurm":
        what = "Open MPI forwards MASTER_ADDR to other nodes only if -x names it"
        yield Problem(last.command.line, what, f"{last.launcher} -x MASTER_ADDR …")


def nobody_sets_it(script: Script) -> Iterator[Problem]:
    """A2: a count or an address from a variable that nothing in the script sets."""
    known = _known_names(script)
    if known is None:
        return
    for command in script.commands:
        for i, word in enumerate(command.words):
            option, equals, value = word.partition("=")
            if option not in _COUNT_OPTIONS:
                continue
            value = value if equals else command.words[i + 1] if i + 1 < len(command.words) else ""
            for name in re.findall(r"\$\{?([A-Za-z_]\w*)(?![\w:-])", re.sub(r"\$\{\w+:?[-=+?][^}]*\}", "", value)):
                if name not in known and not _GIVEN.fullmatch(name) and "MASTER" not in name:
                    what = f"{option} ${name}: nothing in the script sets {name}, so that bash leaves nothing there"
                    yield Problem(command.line, what, f"{option} with the number itself")


def rank_modulo(script: Script) -> Iterator[Problem]:
    """A3: the local rank as rank modulo GPUs is wrong wherever ranks are not dealt node by node."""
    for command in script.commands:
        for name, value in command.sets:
            if re.fullmatch(r"LOCAL_?RANK", name, re.IGNORECASE) and re.search(r"(RANK|PROCID)\w*\}?\s*%", value):
                right = "OMPI_COMM_WORLD_LOCAL_RANK, MPI_LOCALRANKID, SLURM_LOCALID, PALS_LOCAL_RANKID"
                what = f"{name}={value}: a local rank is not the rank modulo GPUs"
                yield Problem(command.line, what, f"the launcher's own: {right}")


def fixed_port(script: Script) -> Iterator[Problem]:
    """A5: two jobs on one node that use the same port."""
    places = [(c.line, f"MASTER_PORT={v}") for c, v in script.assigned("MASTER_PORT") if v.isdecimal()]
    for command in script.commands:
        for option, value in pairwise((*command.words, "")):
            name, equals, joined = option.partition("=")
            given = joined if equals else value
            if re.fullmatch(r"--master[-_]port", name) and given.isdecimal() and given != "0":
                places.append((command.line, f"{name}={given}"))
            if re.fullmatch(r"--rdzv[-_]endpoint", name) and re.search(r":[1-9]\d*$", given):
                places.append((command.line, f"{name}={given}"))
    for line, text in places:
        what = f"{text} is the same in every job: two on one node collide"
        yield Problem(line, what, f"a port of the job's own; {_OURS}")


def tee_hides_status(script: Script) -> Iterator[Problem]:
    """A23: a pipe ends with its last command's status, and tee's is 0."""
    sets = [c.line for c in script.commands if c.program in {"set", "shopt"} and "pipefail" in c.words]
    first_line = script.text.partition("\n")[0]
    if "PIPESTATUS" in script.code or "pipefail" in first_line:
        return
    for command in script.commands:
        training = "tee" in command.into and _trains_or_launches(script, command)
        if training and not any(line <= command.line for line in sets):
            what = f"{command.program} … | tee ends with tee's status: a failure of {command.program} is hidden"
            yield Problem(command.line, what, "set -o pipefail before it")


def rank_of_batch_shell(script: Script) -> Iterator[Problem]:
    """A26: a rank's variables in the batch shell, where they are 0 or not set: every rank gets the same."""
    starting = [launch for launch in script.launches if launch.started]
    one_task = not script.several_nodes() and all((per_node(x, script.request) or 1) == 1 for x in starting)
    by_itself = any("$0" in word or "BASH_SOURCE" in word for x in starting for word in x.started)
    if by_itself or one_task or not (starting or script.reaches()) or not script.directives.options:
        return  # a script that each rank runs, or that has one rank
    known = _known_names(script)
    unset = {"RANK", "LOCAL_RANK"} - known if known is not None else set()  # so that only a rank has them
    for command in script.commands:
        of_rank = _OF_RANK | {name for name in unset if re.search(rf"\$({name}\b|\{{{name}\}})", command.text)}
        names = [name for name in command.expands if name in of_rank]
        if _C10D.search(script.code):  # with it, torchrun does not read --node_rank
            others = _NODE_RANK.sub("", command.text)
            names = [name for name in names if name in others]
        if script.request.nodes == 1:
            names = [name for name in names if not re.search("NODE", name)]  # 0 on the only node
        if not names or command.launched or _in_rank_function(script, command) or _only_prints(command):
            continue
        shown = ", ".join(f"${name}" for name in names)
        what = f"the batch shell expands {shown} before any rank is started: it is 0 there or not set, for every rank"
        launcher = starting[0].launcher if starting else "srun" if script.scheduler == "slurm" else "mpirun"
        right = f"single quotes, so that each rank's shell expands it: {launcher}"
        yield Problem(command.line, what, f"{right} bash -c '… ${names[0]} …'; hpcddp exec sets RANK and LOCAL_RANK")


def host_of_batch_shell(script: Script) -> Iterator[Problem]:
    """A26: a host's name in double quotes, where each rank's own is meant: the batch shell puts its own there."""
    for command in script.commands:
        launch = script.launch_of(command) if command.launched and command.early else None
        if launch is None or not script.on_several_nodes(launch) or _only_prints(command):
            continue
        for name, value in (*_named(command), ("", command.output)):
            host = next((early for early in command.early if _HOST_NAME.search(early) and early in value), "")
            address = _ADDRESS.search(name.lstrip("-").replace("-", "_")) or re.search("[:,@]", value)
            if host and not address and (name or value != host):
                what = f"the batch shell expands {host} before any rank is started: every rank gets the same host"
                right = f"single quotes, so that each rank's shell expands it: {launch.launcher} bash -c '… {host} …'"
                yield Problem(command.line, what, right)
                break


def node_agent_without_place(script: Script) -> Iterator[Problem]:
    """A26: an agent that a launcher starts on each of several nodes, and that is not told which of them it is on."""
    for command in script.commands:
        launch = script.launch_of(command)
        words = rank_maker(launch.started if launch and launch.command == command else command.words)
        if launch is None or not words or not script.on_several_nodes(launch):
            continue
        if "PET_" in script.text or any("hpcddp" in word for word in (*launch.command.words, *command.words)):
            continue  # variables, or hpcddp, say it
        agent, option = find_node_agent(words), partial(torchrun_option, words)
        name = "torchrun" if torchrun_words(words) else agent[1].command if agent else words[0]
        name = f"python {name}" if name.startswith("-m ") else name
        starts = f"{launch.launcher} starts {name} on each of {script.request.nodes} nodes"
        machines = agent is not None and "--machine-rank" in agent[1].rendezvous_options
        count, which = ("num-machines", "machine-rank") if machines else ("nnodes", "node-rank")
        place, static = option(which), (option("rdzv-backend") or "static") == "static"
        elsewhere = place is None and ((machines and option("config-file")) or _has_more_options(words))
        by_ssh = agent is None and {"--no_ssh", "--no-ssh"}.isdisjoint(words)  # deepspeed
        one = option(count) in {None, "1", "1:1"} if agent else by_ssh
        if by_ssh and (option("hostfile") or "-H" in words):
            what = f"{starts}, and each of them starts the processes of all nodes"
            yield Problem(command.line, what, f"{name} … without {launch.launcher}, or with --no_ssh and --node_rank")
        elif one or "--standalone" in words:
            is_given = (option(count) or not machines) and not elsewhere
            if is_given and not _OF_RANK & {*command.expands}:  # a run of its own on each node
                right = "--no_ssh, --node_rank and --hostfile" if by_ssh else f"--{count}={script.request.nodes}"
                yield Problem(command.line, f"{starts}, for one node: each of them trains alone", right)
        elif static and not elsewhere and (place or "0").isdecimal():
            what = f"with --{which} {place}: each takes itself for node {place}"
            what = what if place else f"without --{which}: none is told which node it is on"
            variable = "$SLURM_NODEID" if launch.launcher == "srun" else "$OMPI_COMM_WORLD_RANK"
            right = f"{launch.launcher} bash -c '{name} … --{which} {variable} …'"
            yield Problem(command.line, f"{starts} {what}", right if machines else f"{right}, or --rdzv-backend=c10d")


def submit_host(script: Script) -> Iterator[Problem]:
    """A27: the host that a job was submitted from, or a launcher's host that the batch shell does not know yet."""
    in_batch = {name for command in script.commands if not command.launched for name in command.expands}
    slurm = script.scheduler == "slurm"
    right = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)' if slurm else '$(head -n 1 "$PBS_NODEFILE")'
    for command in script.commands:
        for name, value in _named(command):
            found = _FOREIGN_HOST.search(value)
            if found and _ADDRESS.search(name) and (found[1] in _SUBMIT_HOSTS or found[1] in in_batch):
                where = "not set in the batch shell: only srun sets it"
                if found[1] in _SUBMIT_HOSTS:
                    where = "the host that the job was submitted from, where no rank runs"
                yield Problem(command.line, f"{found[1]} is {where}", f"export MASTER_ADDR={right}; {_OURS}")
                break


def port_of_each_task(script: Script) -> Iterator[Problem]:
    """A29: a port, or a rendezvous's id, that each task draws for itself."""
    for command in script.commands:
        drawn = [(n, v) for n, v in _named(command) if _MEETING.search(n) and _DRAWN.search(_late(command, v))]
        if command.launched and drawn:
            port = "PORT" in drawn[0][0].upper() or "endpoint" in drawn[0][0]
            what = f"each task draws {'a port' if port else 'an id'} of its own: they never meet"
            name = "MASTER_PORT" if port else "RDZV_ID"
            yield Problem(command.line, what, f"export {name} in the script, before the launcher; {_OURS}")


def signal_kills_script(script: Script) -> Iterator[Problem]:
    """A30: a warning signal to the batch shell, which ends by it, or reads it when its program has ended."""
    option = script.directives.get("--signal")
    if script.scheduler != "slurm" or option is None or not re.match("[^:]*B[^:]*:", option.value):
        return
    name = _signal_name(option.value.partition(":")[2].partition("@")[0])
    program = next((c for c in reversed(script.commands) if not c.launched and _trains_or_launches(script, c)), None)
    if program is None or program.text.startswith("exec "):
        return
    traps = [c for c in script.commands if c.program == "trap" and name in map(_signal_name, c.words[2:])]
    ours = "hpcddp warns the ranks: --set signal=5m"
    if not traps:
        what = f"SIG{name} goes to the batch shell alone, which has no trap for it: the job ends there"
        right = f"a trap, and the program in the background with wait; or --signal={name}@…; {ours}"
        yield Problem(option.line, what, right)
    elif not program.background and not re.search(r"[)}]\s*&\s*(\n|#|;|wait)", script.text):
        what = f"the trap for SIG{name} runs when {program.program} has ended: bash waits for what is in the foreground"
        yield Problem(program.line, what, f"{program.program} … & wait; {ours}")


def signal_to_nothing(script: Script) -> Iterator[Problem]:
    """A31: a warning signal to the steps of a job that has none."""
    option = script.directives.get("--signal")
    if script.scheduler != "slurm" or option is None or "B" in option.value.partition("@")[0].partition(":")[0][:2]:
        return
    program = next((c for c in script.commands if trains(c.words) or torchrun_words(c.words)), None)
    if program and not script.reaches():
        what = (
            f"--signal={option.value} goes to what srun starts: {program.program} is started without it and gets none"
        )
        yield Problem(option.line, what, f"srun {program.program} …; hpcddp warns the ranks: --set signal=5m")


def ends_before_its_ranks(script: Script) -> Iterator[Problem]:
    """A34: what the script starts last is in the background: the script ends, and the job with it."""
    at_end = {"echo", "printf", "date", "exit", "true", "done"}
    there = [c for c in script.commands if not (c.launched or c.captured or c.function or c.program in at_end)]
    last = next((c for c in reversed(there) if c.words), None)
    if last is None or any(c.program in {"wait", "fg"} for c in script.commands):
        return
    starts = _trains_or_launches(script, last) or any(word.rsplit("/", 1)[-1] in REACHES for word in last.words[:4])
    if starts and _is_in_background(script, last):
        what = f"{last.program} … & is the last command: the script ends at once, and the job with it"
        yield Problem(last.line, what, "wait as the last line")


def requeue_of_array(script: Script) -> Iterator[Problem]:
    """A32: the last index of an array has the array's own job id."""
    if script.scheduler != "slurm" or not script.directives.get("--array"):
        return
    for command in script.commands:
        job = command.words[-1] if command.program == "scontrol" and "requeue" in command.words else ""
        if re.search(r"\$\{?SLURM_(ARRAY_)?JOB_?ID\}?$", job):
            what = f"{job} of the array's last index is the whole array: all of its jobs are queued again"
            yield Problem(command.line, what, "scontrol requeue ${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}")


def _is_in_background(script: Script, command: Command) -> bool:
    """An & ends the command, or the group or the loop around it."""
    behind = re.compile(r"[\s;]*([)}]|done\b)[^\n&|]*(2>&1)?\s*&(?!&)")
    return command.background or behind.match(script.text.rpartition(command.text)[2]) is not None


def _has_more_options(words: Sequence[str]) -> bool:
    """A variable may hold more options of an agent: `torchrun --nnodes 2 $ARGS train.py`."""
    end = next((i for i, word in enumerate(words) if word.endswith(".py")), len(words))
    found = pairwise(words[:end])
    return any(word[0] == "$" and (before[:1] != "-" or "=" in before) for before, word in found if word)


def _late(command: Command, value: str) -> str:
    """A value without what the shell around its command has expanded."""
    for early in command.early:
        value = value.replace(early, "")
    return value


def _named(command: Command) -> Iterator[tuple[str, str]]:
    """The values in a command, with the variable or the option that each is for, or "": `A=1`, `--a=1`, `--a 1`."""
    yield from command.sets
    for before, word in pairwise(("", *command.words)):
        name, equals, value = word.partition("=")
        if not word.startswith("-"):
            yield before if before.startswith("-") and "=" not in before else "", word
        elif equals:
            yield name, value


def _known_names(script: Script) -> set[str] | None:
    """The variables that the script sets; None where it reads another file, which may set more."""
    if re.search(r"^\s*(source|\.)\s+(?!.*(profile|activate|modules|bashrc|conda|lmod))", script.code, re.MULTILINE):
        return None
    known = {name for c in script.commands for name, _ in c.sets}
    known |= {w for c in script.commands if c.program in {"read", "mapfile", "readarray"} for w in c.words}
    return known | set(re.findall(r"\bfor\s+(\w+)", script.text))


def _in_rank_function(script: Script, command: Command) -> bool:
    """The command is in a function that the ranks' shells call, or nothing in the batch shell does."""
    name = command.function
    if not name:
        return False
    exported = any(
        c.program in {"export", "declare", "typeset"} and "-f" in c.words and name in c.words for c in script.commands
    )
    called = any(c.words and c.words[0] == name and not c.launched and c.function != name for c in script.commands)
    return exported or not called


def _only_prints(command: Command) -> bool:
    """The command only tests a variable, or prints it for people."""
    if command.program in {"[", "[[", "test", "case"} or (
        command.program[:2] == "((" and not re.search(r"\w\s*=[^=]", command.text)
    ):
        return True
    reads = set(command.into) - {"tee", "grep", "sort", "logger"}
    file = command.output and not re.search(r"\.(log|out|err|txt)$|^/dev/|^&", command.output)
    elsewhere = command.captured or reads or file or "-v" in command.words
    return command.program in {"echo", "printf", "cat", "logger"} and not elsewhere


def _signal_name(word: str) -> str:
    """USR1 of USR1, SIGUSR1, usr1 and 10."""
    number = int(word) if word.isdecimal() else 0
    name = next((s.name for s in signal.Signals if s.value == number), word.upper())
    return name.removeprefix("SIG")


def _trains_or_launches(script: Script, command: Command) -> bool:
    starts = any(launch.command == command and launch.started for launch in script.launches)
    words = expand(command.words, script.values)
    return starts or trains(words) or bool(torchrun_words(words))


def open_document(script: Script) -> Iterator[Problem]:
    """A24: a here-document without an end takes the rest of the script."""
    found = find_open_document(unix_lines(script.text))
    if found is None:
        return
    lines = numbered(unix_lines(script.text))[found.line :]
    alike = next((number for number, line in lines if line.strip() == found.end), 0)
    what = f"the here-document <<{found.end} never ends: the rest of the script is its text, and no command"
    what += f" (line {alike} has blanks beside {found.end})" if alike else ""
    right = f"{found.end} alone on a line, without blanks (behind <<- tabs may stand before it)"
    yield Problem(found.line, what, right)
