"""Mistakes in the commands: the rendezvous, counts, what reaches the other nodes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from hpcddp.lint.finding import Said
from hpcddp.lint.launches import torchrun_words, trains
from hpcddp.lint.script import Script

_NODE_COUNT = re.compile(r"node|host|machine", re.IGNORECASE)
_RANK_COUNT = re.compile(r"rank|slot|proc|gpu|task|world|size_?total|^np$", re.IGNORECASE)
_OURS = "hpcddp exec finds it"
# Variables that schedulers, launchers, modules and login shells set.
_GIVEN = re.compile(
    r"(PBS|SLURM|SGE|PE|OMPI|OMP|PMI|MPI|PALS|NCCL|CUDA|ROCM|CONDA|LSB|FLUX|PJM|COBALT)_?\w*"
    r"|N(SLOTS|HOSTS|QUEUES|CPUS|GPUS)|JOB_(ID|NAME)|TMPDIR|HOME|USER|LOGNAME|PWD|PATH|HOSTNAME|SHELL|RANDOM|SECONDS"
    r"|\w+_(HOME|ROOT|DIR|PATH|BASE|PREFIX|SUBMIT_DIR)|SCRATCH|WORK|PROJECT|GROUP_HOME|EPOCHSECONDS|UID|PPID"
)
_COUNT_OPTIONS = {"-np", "-n", "--np", "--ntasks", "-ppn", "-npernode", "-N", "--nodes", "--nnodes", "--nproc-per-node",
                  "--nproc_per_node", "--num_processes", "--num-processes", "--ntasks-per-node", "--master_addr",
                  "--master-addr", "--master_port", "--master-port", "--rdzv_endpoint", "--rdzv-endpoint"}  # fmt: skip


def lines_are_no_nodes(script: Script) -> Iterator[Said]:
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
                yield Said(
                    command.line,
                    f"{name} counts the lines of the nodefile, which lists each node {times}",
                    f'{name}=$(sort -u "$PBS_NODEFILE" | wc -l)',
                )


def hostname_reads_nothing(script: Script) -> Iterator[Said]:
    """M11: hostname does not read its input."""
    for command in script.commands:
        for found in re.finditer(r"\|\s*hostname\b[^|;)]*", command.text):
            yield Said(
                command.line,
                f"{found[0].strip()!r}: hostname ignores its input and names the host that it runs on",
                'read -r MASTER_ADDR < "$PBS_NODEFILE"',
            )
            break


def own_hostname(script: Script) -> Iterator[Said]:
    """M12: a MASTER_ADDR that each task works out for itself is each task's own host."""
    for command, value in script.assigned("MASTER_ADDR"):
        if command.nested and re.search(r"\$\(\s*hostname|`\s*hostname|\$\{?HOSTNAME", value):
            yield Said(
                command.line,
                "MASTER_ADDR is worked out in each task: every task takes its own host for the master",
                "export MASTER_ADDR in the script, before the launcher",
            )


def job_id_in_port(script: Script) -> Iterator[Said]:
    """M13: a PBS job id is no number: `1234[5].pbs1`, and 0189 is bad octal."""
    for line, text in _lines(script):
        if "PBS_JOBID" not in text and "JOB_ID" not in text.replace("SLURM_JOB_ID", ""):
            continue
        sums = re.findall(r"\$\(\((.*?)\)\)", text) + re.findall(r"\bexpr\b(.*)", text)
        if any("JOB" in s and "10#" not in s and "tr -" not in s and "//[!0-9]" not in s for s in sums):
            yield Said(
                line,
                "a number is worked out from the job id as it stands: 1234[5].pbs1 (an array) and 0189 break it",
                "strip it to digits and say base 10: $((12000 + 10#${id//[!0-9]/} % 20000))",
            )


def gpu_aware_mpi(script: Script) -> Iterator[Said]:
    """M20: GPU-aware MPI beside NCCL can deadlock."""
    uses_nccl = re.search(r"\bNCCL_|\bMASTER_ADDR\b|torchrun|torch\.distributed", script.code)
    for command, value in script.assigned("MPICH_GPU_SUPPORT_ENABLED"):
        if value == "1" and uses_nccl:
            yield Said(
                command.line,
                "GPU-aware MPI is switched on beside NCCL: both drive the GPUs, and may deadlock",
                "export MPICH_GPU_SUPPORT_ENABLED=0",
            )


def master_addr_stays_here(script: Script) -> Iterator[Said]:
    """A1: MASTER_ADDR that the ranks on other nodes never see."""
    launches = [x for x in script.launches if x.started and not torchrun_words(x.started) and _runs_python(x.started)]
    if not script.several_nodes() or not launches or any("hpcddp" in w for x in launches for w in x.started):
        return
    assigned = [c for c, _ in script.assigned("MASTER_ADDR") if not c.nested]
    forwarded = "MASTER_ADDR" in "".join(w for x in launches for w in (*x.options, *x.started))
    exports = re.search(r"\b(export|declare -x)\b[^\n;]*\bMASTER_ADDR\b|set -a\b|allexport", script.code)
    by_argument = re.search(r"--?(master[-_]addr|dist[-_]url|init[-_]method|rdzv)|tcp://|file://", script.code)
    if forwarded or by_argument or any(c.nested for c, _ in script.assigned("MASTER_ADDR")):
        return
    last = launches[-1]
    if not assigned and not exports:
        yield Said(
            last.command.line,
            "MASTER_ADDR is never set: unless the program finds it, ranks look for rank 0 on their own host",
            f"export MASTER_ADDR=FIRST_HOST, forwarded to every node; {_OURS}",
        )
    elif not exports and not last.command.sets:
        line = assigned[-1].line
        yield Said(line, "MASTER_ADDR is set and never exported: no rank sees it", "export MASTER_ADDR")
    elif exports and last.is_openmpi and script.scheduler != "slurm":
        yield Said(
            last.command.line,
            "Open MPI forwards MASTER_ADDR to other nodes only if -x names it",
            f"{last.launcher} -x MASTER_ADDR …",
        )


def nobody_sets_it(script: Script) -> Iterator[Said]:
    """A2: a count or an address from a variable that nothing in the script sets."""
    if re.search(r"^\s*(source|\.)\s+(?!.*(profile|activate|modules|bashrc|conda|lmod))", script.code, re.MULTILINE):
        return  # may come from there
    known = {name for c in script.commands for name, _ in c.sets}
    known |= {w for c in script.commands if c.program in {"read", "mapfile", "readarray"} for w in c.words}
    known |= set(re.findall(r"\bfor\s+(\w+)", script.text))
    for command in script.commands:
        for i, word in enumerate(command.words):
            option, equals, value = word.partition("=")
            if option not in _COUNT_OPTIONS:
                continue
            value = value if equals else command.words[i + 1] if i + 1 < len(command.words) else ""
            for name in re.findall(r"\$\{?([A-Za-z_]\w*)(?![\w:-])", re.sub(r"\$\{\w+:?[-=+?][^}]*\}", "", value)):
                if name not in known and not _GIVEN.fullmatch(name) and "MASTER" not in name:
                    yield Said(
                        command.line,
                        f"{option} ${name}: nothing in the script sets {name}, so that bash leaves nothing there",
                        f"{option} with the number itself",
                    )


def rank_modulo(script: Script) -> Iterator[Said]:
    """A3: the local rank as rank modulo GPUs is wrong wherever ranks are not dealt node by node."""
    for command in script.commands:
        for name, value in command.sets:
            if re.fullmatch(r"LOCAL_?RANK", name, re.IGNORECASE) and re.search(r"(RANK|PROCID)\w*\}?\s*%", value):
                yield Said(
                    command.line,
                    f"{name}={value}: a local rank is not the rank modulo GPUs",
                    "the launcher's own: OMPI_COMM_WORLD_LOCAL_RANK, MPI_LOCALRANKID, SLURM_LOCALID, PALS_LOCAL_RANKID",
                )


def fixed_port(script: Script) -> Iterator[Said]:
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
        yield Said(
            line, f"{text} is the same in every job: two on one node collide", f"a port of the job's own; {_OURS}"
        )


def tee_hides_status(script: Script) -> Iterator[Said]:
    """A23: a pipe ends with its last command's status, and tee's is 0."""
    sets = [c.line for c in script.commands if c.program in {"set", "shopt"} and "pipefail" in c.words]
    first_line = script.text.partition("\n")[0]
    if "PIPESTATUS" in script.code or "pipefail" in first_line:
        return
    starts = {launch.command for launch in script.launches if launch.started}
    for command in script.commands:
        training = command in starts or torchrun_words(command.words) or trains(command.words)
        if "tee" in command.into and training and not any(line <= command.line for line in sets):
            yield Said(
                command.line,
                f"{command.program} … | tee ends with tee's status: a failure of {command.program} is hidden",
                "set -o pipefail before it",
            )


def _lines(script: Script) -> list[tuple[int, str]]:
    seen: dict[tuple[int, str], None] = {(c.line, c.text): None for c in script.commands}
    return list(seen)


def _runs_python(words: tuple[str, ...]) -> bool:
    return any(re.fullmatch(r"(.*/)?python[\d.]*|.*\.py", w) for w in words)
