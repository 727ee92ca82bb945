"""Slurm. Recorded environments: tests/captures/ranks/slurm-*; tests/cluster runs a real one."""

from __future__ import annotations

from hpcddp.record import TYPE_CHECKING
from hpcddp.schedulers.nodelist import expand_counts, expand_nodelist
from hpcddp.schedulers.row import Answer, Commands, Directives, OneGpu, QueueFound, Scheduler, Variables
from hpcddp.units import read_number

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpcddp.schedulers.allocation import HostsFound

_MOST_COMPONENTS = 128  # MAX_HET_JOB_COMPS
_LETTERS = {
    "A": "account", "a": "array", "B": "extra-node-info", "b": "begin", "C": "constraint", "c": "cpus-per-task",
    "D": "chdir", "d": "dependency", "e": "error", "F": "nodefile", "G": "gpus", "H": "hold", "h": "help",
    "I": "immediate", "i": "input", "J": "job-name", "k": "no-kill", "L": "licenses", "M": "clusters",
    "m": "distribution", "N": "nodes", "n": "ntasks", "O": "overcommit", "o": "output", "p": "partition",
    "Q": "quiet", "q": "qos", "S": "core-spec", "s": "oversubscribe", "t": "time", "V": "version", "v": "verbose",
    "W": "wait", "w": "nodelist", "x": "exclude",
}  # fmt: skip
_INTERACTIVE_STEP = "4294967290"  # the step of salloc's shell


def find_hosts(env: Mapping[str, str], nodefile: str | None) -> HostsFound:  # noqa: ARG001  # Slurm writes no such file
    """The hosts by Slurm's variables. Heterogeneous jobs: every component's."""
    # SLURM_JOB_NODELIST is the first component's; the others stand in variables of their own.
    components = min(read_number(env.get("SLURM_HET_SIZE", "")) or 0, _MOST_COMPONENTS)
    groups = [f"_HET_GROUP_{i}" for i in range(components)] or [""]
    counts: dict[str, int] = {}
    source = ""
    for group in groups:
        variable = f"SLURM_JOB_NODELIST{group}"
        if variable not in env and not group:
            variable = "SLURM_NODELIST"
        if variable not in env:
            continue
        source = source or variable
        names = expand_nodelist(env[variable], variable)
        tasks = env.get(f"SLURM_TASKS_PER_NODE{group}", "")
        slots = expand_counts(tasks, f"SLURM_TASKS_PER_NODE{group}") if tasks else []
        if len(slots) != len(names):  # inside a step this is the step's, which may be smaller than the job
            slots = [1] * len(names)
        for name, count in zip(names, slots, strict=True):
            counts[name] = counts.get(name, 0) + count
    return tuple(counts.items()) or None, source


def count_ranks(_slots: int | None, env: Mapping[str, str]) -> int | None:
    """The job's number of tasks, where all of it is one component's."""
    return read_number(env.get("SLURM_NTASKS", "")) if "SLURM_HET_SIZE" not in env else None


def describe_answer(answer: Answer) -> str:
    """When and where a job would run, as `sbatch --test-only` says it."""
    said = [line for line in answer.stderr.splitlines() if line.startswith("sbatch: Job ")]
    return said[-1].removeprefix("sbatch: ") if said else ""


def parse_state(answer: Answer) -> str | None:
    """`JobState=RUNNING` of `scontrol show job`."""
    import re

    said = re.search(r"\bJobState=(\w+)", answer.stdout)
    return said[1] if said else "gone" if "Invalid job id" in answer.stderr else None


def parse_end(answer: Answer) -> int | None:
    """`EndTime=2026-11-21T02:12:37`, in this host's time, of a job that runs; later it is the present."""
    import re
    import time

    said = re.search(r"\bEndTime=(\S+)", answer.stdout)
    if not said or parse_state(answer) != "RUNNING":
        return None
    try:
        return int(time.mktime(time.strptime(said[1], "%Y-%m-%dT%H:%M:%S")))
    except ValueError:
        return None


def parse_taken(answer: Answer, env: Mapping[str, str]) -> bool:
    """A preempted job has `PreemptTime=`; one whose node failed, or that is queued again, its own state. One at its
    time limit, which may have been changed, is COMPLETING for a reason, while `scancel` leaves Reason=None. While one
    that will be queued again ends (`scontrol requeue`), its next start is counted already."""
    import re

    starts = re.search(r"\bRestarts=(\d+)", answer.stdout)
    if starts and int(starts[1]) > (read_number(env.get("SLURM_RESTART_COUNT", "")) or 0):
        return True

    why = re.search(r"\bPreemptTime=(?!None)|\bReason=(TimeLimit|NodeDown|Preempt)", answer.stdout)
    return why is not None or parse_state(answer) in {"NODE_FAIL", "PREEMPTED", "REQUEUED", "TIMEOUT"}


def parse_partitions(text: str) -> list[QueueFound]:
    """See slurm_queues.py, which no rank needs."""
    from hpcddp.schedulers.slurm_queues import parse_partitions as parse

    return parse(text)


SCHEDULER = Scheduler(
    name="slurm",
    title="Slurm",
    order=10,
    generic_site="generic-slurm",
    directives=Directives(
        prefix="#SBATCH",
        walltime=r"(?:--time[= ]|-t ?)([\d:-]+)",
        options={
            "mem_gb": "--mem",
            "gpu_type": "--gpus-per-node",
            "reservation": "--reservation",
            "constraint": "--constraint",
            "exclusive": "--exclusive",
            "output": "--output",
            "mail": "--mail-type",
            "mail_to": "--mail-user",
            "array": "--array",
            "array_limit": "--array",
            "dependency": "--dependency",
            "hold": "--hold",
            "requeue": "--requeue",
            "chain": "--dependency",
            "signal": "--signal",
        },
        typed={
            **dict.fromkeys(("--partition", "-p", "--qos", "-q"), "--queue"),
            "-A": "--account",
            **dict.fromkeys(("--time", "-t"), "--walltime"),
            **dict.fromkeys(("--job-name", "-J"), "--name"),
            "-N": "--nodes",
            **dict.fromkeys(("--ntasks-per-node", "--tasks-per-node"), "--ranks-per-node"),
            **dict.fromkeys(("--ntasks", "-n"), "--nodes N --ranks-per-node R"),
            **dict.fromkeys(("--gpus", "-G", "--gres"), "--gpus-per-node G"),
            **dict.fromkeys(("--cpus-per-task", "-c"), "--cpus-per-rank"),
            "--mem": "--set mem_gb=512",
            "-o": "--set output=",
            "-a": "--set array=",
            "-d": "--set dependency=",
            "-C": "--set constraint=",
        },
        letters=_LETTERS,
        # what a real sbatch 22.05 refuses; tests/cluster/test_options.py
        alternatives=(
            ("--mem", "--mem-per-cpu", "--mem-per-gpu"),
            ("--ntasks-per-gpu", "--gpus-per-task"),
            ("--ntasks-per-gpu", "--gpus-per-socket"),
            ("--ntasks-per-gpu", "--ntasks-per-node"),
            ("--cpus-per-task", "--cpus-per-gpu"),
            ("--core-spec", "--thread-spec"),
            ("--bb", "--bbf"),
        ),
        last_wins=(("--exclusive", "--oversubscribe"),),
        gpu_counts={
            "--gres": "gpu:",
            **dict.fromkeys(("--gpus", "--gpus-per-node", "--gpus-per-task", "--gpus-per-socket"), ""),
        },
        account="--account",
        site_words={
            "account": ("--account",),
            "queue_option": ("--qos",),
            "gpus_option": ("--gres", "--gpus", "none"),
        },
        # Slurm keeps the last of two, without a word.
        printed=(
            *("--nodes", "--ntasks", "--ntasks-per-node", "--job-name", "--time", "--partition", "--account"),
            *("--cpus-per-task", "--requeue", "--no-requeue", "--array"),
        ),
        needs={
            "--mem-per-gpu": ("--gres", "--gpus", "--gpus-per-node", "--gpus-per-task"),
            "--gpus-per-socket": ("--sockets-per-node", "--extra-node-info"),
            "--gpus-per-task": ("--ntasks", "--gpus", "--nodes"),
            "--ntasks-per-gpu": ("--ntasks", "--nodes", "--gres", "--gpus", "--gpus-per-node", "--gpus-per-socket"),
            "--distribution=arbitrary": ("--nodelist", "--nodefile"),
        },
        one_of=("--gres", "--gpus", "--gpus-per-node"),
        synonyms={"--tasks-per-node": "--ntasks-per-node", "--ntasks-per-tres": "--ntasks-per-gpu"},
        no_submit=("--test-only", "--wait"),
        attached=True,
        outputs=("--output", "--error"),
        output=r"[\w.+/%-]*[\w.+%-]",  # %x, %j; a file
        constraint=r"[\w.&|*()\[\]-]+",
        both_constraints="{}&{}",
        mail={"begin": "BEGIN", "end": "END", "fail": "FAIL"},
        mail_separator=",",
        array_limit="%{}",
        batch_only=r"--(output|requeue|no-requeue|array|hold|signal)\b",
    ),
    variables=Variables(
        prefixes=("SLURM_", "SLURMD_"),
        job_id=("SLURM_JOB_ID", "SLURM_JOBID"),  # the second in older releases
        restarts="SLURM_RESTART_COUNT",
        # the count alone may be inherited, from a job that was queued again and has submitted this one
        of_start=("SLURM_RESTART_COUNT", "SLURM_JOB_NODELIST"),
        array_index=("SLURM_ARRAY_TASK_ID",),
        array_id="SLURM_ARRAY_JOB_ID",
        folder="SLURM_SUBMIT_DIR",
        host="SLURMD_NODENAME",
        cpus="SLURM_CPUS_ON_NODE",
        cpus_of_nodes="SLURM_JOB_CPUS_PER_NODE",  # salloc's shell may be on the login node, and has this alone
        end="SLURM_JOB_END_TIME",
        interactive={"SLURM_STEP_ID": _INTERACTIVE_STEP, "SLURM_PTY_PORT": ""},
        settings=("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_TIME_FORMAT"),
    ),
    beside={"SLURM_OVERLAP": "1"},  # a step with a silent node blocks every later one, for minutes
    # It gives each task a cgroup with its GPU alone: no peer-to-peer copies between a node's ranks (NVIDIA/nccl#1066).
    one_gpu=OneGpu(
        option="--gpus-per-task",
        marks={"SLURM_GPUS_PER_TASK": "", "SLURMD_TRES_BIND": "per_task"},  # the second: srun's own option, 22.05
        gpus="SLURM_GPUS_ON_NODE",
        instead="ask with --gpus-per-node, or add --gres-flags=allow-task-sharing",
    ),
    daemons=("slurmstepd",),
    commands=Commands(
        submit=("sbatch",),
        cancel=("scancel",),
        follow=("sbatch", "--parsable", "--dependency=afterany:{job}", "{script}"),
        interactive=("salloc",),
        hand_in=("sbatch", "--parsable", "{options}", "{script}"),
        down=r"Unable to contact|[Uu]nable to connect|Connection refused|in standby mode|Zero Bytes were transmitted",
        submitted=r"(\d+)(?:;.+)?",  # with the cluster's name where there are several
        stop=("scancel", "--batch", "--signal=TERM", "{job}"),  # the script alone, and no SIGKILL after it
        question=("sbatch", "--test-only"),
        describe=describe_answer,
        state=("scontrol", "show", "job", "{}"),
        parse_state=parse_state,
        parse_end=parse_end,
        parse_taken=parse_taken,
        jobs=("squeue", "--noheader", "--states=all", "--user={user}", "--format=%F|%A|%K|%T|%S|%e|%r|%E|"),
        ask_env={"SLURM_TIME_FORMAT": "standard", "SLURM_BITSTR_LEN": "0"},
        starter=("srun", "--overlap", "--nodes=1", "--ntasks=1", "--nodelist={host}"),
        drop=("scontrol", "update", "JobId={job}", "NodeList={kept}"),
        survey=(("sinfo", "--all", "--exact", "--noheader", "--format=%R|%D|%c|%m|%G|%l|%a|%s"),),
        parse_survey=parse_partitions,
        accounts=("sacctmgr", "--noheader", "--parsable2", "show", "associations", "user={user}", "format=account"),
    ),
    # scontrol show job, JobState; Slurm src/common/slurm_protocol_defs.c, job_state_string
    states={
        "PENDING": "queued",
        "RUNNING": "running",
        "SUSPENDED": "suspended",
        "COMPLETING": "exiting",
        "COMPLETED": "finished",
        "CANCELLED": "cancelled",
        "FAILED": "failed",
        "TIMEOUT": "failed",
        "NODE_FAIL": "failed",
        "BOOT_FAIL": "failed",
        "DEADLINE": "failed",
        "OUT_OF_MEMORY": "failed",
        "PREEMPTED": "failed",
        "CONFIGURING": "running",
        "REQUEUED": "queued",
        "REQUEUE_HOLD": "held",
        "REQUEUE_FED": "queued",
        "SPECIAL_EXIT": "held",
        "RESIZING": "running",
        "SIGNALING": "running",
        "STAGE_OUT": "exiting",
        "STOPPED": "suspended",
        "REVOKED": "cancelled",
    },
    find_hosts=find_hosts,
    count_ranks=count_ranks,
)
