"""Slurm. Recorded environments: tests/captures/ranks/slurm-*; tests/cluster runs a real one."""

from __future__ import annotations

from hpcddp.record import TYPE_CHECKING
from hpcddp.schedulers.allocation import expand_counts, expand_nodelist
from hpcddp.schedulers.job_id import JobId, parse_id
from hpcddp.schedulers.row import (
    CommandAnswer,
    Commands,
    Directives,
    JobFound,
    JobsFound,
    QueueFound,
    Scheduler,
    Variables,
    read_time,
)
from hpcddp.units import printable, read_number

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpcddp.schedulers.allocation import HostsFound


#: The states of a job that has ended, of which the state says more than the reason.
_SAYS_WHY = ("TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "REVOKED")
#: Why a job waits that will not start by itself (Slurm src/common/job_state_reason.c, and what slurmctld writes).
_HELD = ("JobHeld", "JobHoldMaxRequeue", "launch failed requeued held", "DependencyNeverSatisfied", "held state")
_FIELDS = 8  # of sinfo's lines
_MOST_COMPONENTS = 128  # MAX_HET_JOB_COMPS
_INTERACTIVE_STEP = "4294967290"  # the step of salloc's shell
_LETTERS = {
    "A": "account", "a": "array", "B": "extra-node-info", "b": "begin", "C": "constraint", "c": "cpus-per-task",
    "D": "chdir", "d": "dependency", "e": "error", "F": "nodefile", "G": "gpus", "H": "hold", "h": "help",
    "I": "immediate", "i": "input", "J": "job-name", "k": "no-kill", "L": "licenses", "M": "clusters",
    "m": "distribution", "N": "nodes", "n": "ntasks", "O": "overcommit", "o": "output", "p": "partition",
    "Q": "quiet", "q": "qos", "S": "core-spec", "s": "oversubscribe", "t": "time", "V": "version", "v": "verbose",
    "W": "wait", "w": "nodelist", "x": "exclude",
}  # fmt: skip


# ---- jobs


def parse_jobs(answer: CommandAnswer, states: Mapping[str, str]) -> JobsFound:
    """The jobs of `squeue --noheader --format=%F|%A|%K|%T|%S|%e|%r|%E|`: the job's id, of an array the array's; the id
    of one job of an array; index; state; start, perhaps an estimate; end; reason; the jobs that it waits for. No name
    is asked for: it may hold line ends. `states`: its word -> ours."""
    if answer.status:
        return JobsFound((), answer.why("squeue"))
    jobs, odd = [], 0
    *lines, rest = answer.stdout.split("\n")  # a line without its end may be cut off
    for line in lines:
        job = _parse(line, states)
        if job is not None:
            jobs.append(job)
        elif line.strip():
            odd += 1
    odd += bool(rest)
    return JobsFound(tuple(jobs), f"squeue: {odd} of its lines cannot be read" if odd else "")


def _parse(line: str, states: Mapping[str, str]) -> JobFound | None:
    fields = line.split("|", 7)
    if len(fields) != 8 or not fields[0].isdecimal():
        return None
    job, raw, index, word, start, end, reason, after = fields
    state = states.get(word, "unknown")
    if state == "queued" and any(text in reason for text in _HELD):
        state = "held"
    why = "" if reason in {"None", "", "NonZeroExitCode"} else reason
    if state in {"queued", "held"} and reason.startswith("Dependency") and (jobs := _read_after(after)):
        why = f"waits for {jobs}" if reason == "Dependency" else f"{why}: it waits for {jobs}"
    if word in _SAYS_WHY:
        why = f"{word}: {why}" if why else word
    return JobFound(_read_id(job, raw, index), state, printable(why), read_time(start), read_time(end))


def parse_ended(answer: CommandAnswer, states: Mapping[str, str]) -> JobsFound:
    """The jobs of `sacct --noheader --parsable2 --allocations --format=JobID,State,ExitCode,Start,End,NodeList`."""
    if answer.status:
        return JobsFound((), answer.why("sacct"))
    jobs = []
    for line in answer.stdout.splitlines():
        fields = line.split("|")
        if len(fields) != 6 or not fields[0][:1].isdigit():
            continue
        job, word, code, start, end, nodes = fields
        status, _, number = code.partition(":")
        signal = read_number(number) or 0
        why = f"{word} on {nodes}" if word.split(" ")[0] in {*_SAYS_WHY, "CANCELLED"} else ""
        exit_status = 128 + signal if signal else read_number(status)
        state = states.get(word.split(" ")[0], "unknown")  # CANCELLED by 1000
        jobs.append(JobFound(parse_id(job), state, printable(why), read_time(start), read_time(end), exit_status))
    return JobsFound(tuple(jobs))


def _read_id(job: str, raw: str, index: str) -> JobId:
    if index == "N/A":
        return JobId(job, job)
    index = index.partition("%")[0]
    return JobId(f"{job}_{index}" if index.isdecimal() else f"{job}_[{index}]", job, index, "" if raw == job else raw)


def _read_after(text: str) -> str:
    """The ids in `afterany:12(unfulfilled),afterok:13_*(failed)`."""
    import re

    return ", ".join(re.findall(r":(\d+)(?:_\*|[+]\d+)*\(", text) or re.findall(r"\bafter\w*:(\d+)", text))


# ---- partitions


def parse_partitions(text: str) -> list[QueueFound]:
    """Partitions, of the largest node each has: `gpu|4|16|16000|gpu:a100:8(S:0-1)|1-00:00:00|up|1-4`. ValueError for a
    line of another form, and for none: what is cut off or an error page says nothing of the partitions it lacks."""
    rows = [line.split("|") for line in text.splitlines() if line.strip()]
    odd = next((row for row in rows if len(row) != _FIELDS or not row[0]), None)
    if odd is not None or not rows:
        raise ValueError(f"{'|'.join(odd)[:60]!r} is no partition's line" if odd else "it shows no partition")
    counted = any("gpu:" in row[4] for row in rows)  # else this Slurm does not count GPUs
    lines: dict[str, list[QueueFound]] = {}
    for row in rows:
        lines.setdefault(row[0], []).append(_read_line(row, counted))
    return [_join(each) for each in lines.values()]


def _read_line(row: list[str], counted: bool) -> QueueFound:
    name, nodes, cpus, memory, gres, limit, up, size = row
    gpus, gpu = _read_gpus(gres, counted)
    return QueueFound(
        name,
        read_number(nodes),
        read_number(cpus.rstrip("+")) or None,
        (read_number(memory.rstrip("+")) or 0) // 1024 or None,
        gpus,
        gpu,
        _parse_limit(limit),
        read_number(size.rpartition("-")[2]) or None,  # else it is infinite
        up == "up",
        mixed=cpus.endswith("+"),  # the least of several
    )


def _join(lines: list[QueueFound]) -> QueueFound:
    largest = max(lines, key=lambda line: (line.gpus or 0, line.cpus or 0))
    kinds = {(line.cpus, line.gpus, line.gpu) for line in lines}
    of_it = [line for line in lines if (line.cpus, line.gpus) == (largest.cpus, largest.gpus)]
    return largest._replace(
        nodes=sum(line.nodes or 0 for line in lines) or None,
        mem_gb=max((line.mem_gb for line in of_it if line.mem_gb), default=None),
        mixed=len(kinds) > 1 or any(line.mixed for line in lines),
    )


def _read_gpus(gres: str, counted: bool) -> tuple[int | None, str | None]:
    """`gpu:a100:4(S:0-1),nvme:1`; of several kinds in a node the sum, without a kind."""
    import re

    kinds = re.findall(r"\bgpu:(?:([^:,()]+):)?(\d{1,9})(?=[(,]|$)", gres, re.ASCII)
    if not kinds:
        return (0 if counted and "gpu:" not in gres else None), None
    return sum(int(count) for _, count in kinds), (kinds[0][0] or None) if len(kinds) == 1 else None


def _parse_limit(limit: str) -> str | None:
    """sinfo's `1-00:00:00`, `30:00` (minutes) or `infinite`, as H:M:S."""
    import re

    found = re.fullmatch(r"(?:(\d{1,9})-)?(?:(\d{1,9}):)?(\d{1,9}):(\d{1,9})", limit, re.ASCII)
    if not found:
        return None
    days, hours, minutes, seconds = (int(n or 0) for n in found.groups())
    whole = f"{days * 24 + hours}:{minutes:02d}:{seconds:02d}"
    return whole if whole.strip("0:") else None


# ---- the job around a process


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


def parse_job(job: JobId, answer: CommandAnswer, states: Mapping[str, str], env: Mapping[str, str]) -> JobFound | None:
    """A job by `scontrol show job`. `EndTime` is in this host's time, and the present once the job has ended.

    A preempted job has `PreemptTime=`; one whose node failed, or that is queued again, its own state. One at its time
    limit, which may have been changed, is COMPLETING for a reason, while `scancel` leaves Reason=None. While one that
    will be queued again ends (`scontrol requeue`), its next start is counted already.
    """
    import re

    fields = dict(re.findall(r"\b(JobState|EndTime|Restarts|Reason|PreemptTime)=(\S+)", answer.stdout))
    word = fields.get("JobState")
    if word is None:
        return JobFound(job, "gone") if "Invalid job id" in answer.stderr else None
    restarts = read_number(fields.get("Restarts", "")) or 0
    is_taken = (
        restarts > (read_number(env.get("SLURM_RESTART_COUNT", "")) or 0)
        or fields.get("PreemptTime", "None") != "None"
        or fields.get("Reason", "").startswith(("TimeLimit", "NodeDown", "Preempt"))
        or word in {"NODE_FAIL", "PREEMPTED", "REQUEUED", "TIMEOUT"}
    )
    return JobFound(job, states.get(word, "unknown"), ends=read_time(fields.get("EndTime", "")), is_taken=is_taken)


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
        site_words={"account": ("--account",), "queue_option": ("--qos",), "gpus_option": ("--gres", "--gpus", "none")},
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
        output_name="{name}-{number}.out",  # as the template says
        constraint=r"[\w.&|*()\[\]-]+",
        both_constraints="{}&{}",
        mail={"begin": "BEGIN", "end": "END", "fail": "FAIL"},
        mail_separator=",",
        array_limit="%{}",
    ),
    variables=Variables(
        prefixes=("SLURM_", "SLURMD_"),
        job_id=("SLURM_JOB_ID", "SLURM_JOBID"),  # the second in older releases
        restarts="SLURM_RESTART_COUNT",
        # the count alone may be inherited, from a job that was queued again and has submitted this one
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
    overlap={"SLURM_OVERLAP": "1"},  # a step with a silent node blocks every later one, for minutes
    gpus_per_rank_option="--gpus-per-task",
    daemons=("slurmstepd",),
    commands=Commands(
        submit=("sbatch",),
        cancel=("scancel",),
        over=("Invalid job id", "already completing"),
        follow=("sbatch", "--parsable", "--dependency=afterany:{job}", "{script}"),
        interactive=("salloc",),
        hand_in=("sbatch", "--parsable", "{options}", "{script}"),
        down=r"Unable to contact|[Uu]nable to connect|Connection refused|in standby mode|Zero Bytes were transmitted",
        submitted=r"(\d+)(?:;.+)?",  # with the cluster's name where there are several
        stop=("scancel", "--batch", "--signal=TERM", "{job}"),  # the script alone, and no SIGKILL after it
        state=("scontrol", "show", "job", "{}"),
        parse_job=parse_job,
        parse_jobs=parse_jobs,
        jobs=("squeue", "--noheader", "--states=all", "--user={user}", "--format=%F|%A|%K|%T|%S|%e|%r|%E|"),
        ended=(
            *("sacct", "--noheader", "--parsable2", "--allocations", "--jobs={}"),
            "--format=JobID,State,ExitCode,Start,End,NodeList",
        ),
        parse_ended=parse_ended,
        ask_env={"SLURM_TIME_FORMAT": "standard", "SLURM_BITSTR_LEN": "0"},
        starter=("srun", "--overlap", "--nodes=1", "--ntasks=1", "--nodelist={host}"),
        drop=("scontrol", "update", "JobId={job}", "NodeList={others}"),
        list_queues="sinfo -s",
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
