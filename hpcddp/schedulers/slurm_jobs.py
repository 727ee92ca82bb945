"""Slurm's jobs as text: what `squeue` prints of them. It is not asked for their names, which may hold line ends."""

from __future__ import annotations

from hpcddp.record import TYPE_CHECKING
from hpcddp.schedulers.job_id import JobId
from hpcddp.schedulers.row import JobFound, JobsFound

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpcddp.schedulers.row import Answer

#: The states of a job that has ended, of which the state says more than the reason.
_SAYS_WHY = ("TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "REVOKED")
#: Why a job waits that will not start by itself (Slurm src/common/job_state_reason.c, and what slurmctld writes).
_HELD = ("JobHeld", "JobHoldMaxRequeue", "launch failed requeued held", "DependencyNeverSatisfied", "held state")


def parse_jobs(answer: Answer, states: Mapping[str, str]) -> JobsFound:
    """The jobs of `squeue --noheader --format=%F|%A|%K|%T|%S|%e|%r|%E|`: the job's id, of an array the array's; its
    own; index; state; start, perhaps an estimate; end; reason; the jobs that it waits for. `states`: its word -> ours.
    """
    if answer.status:
        said = [line for line in answer.stderr.splitlines() if line.strip()]
        return JobsFound((), f"squeue: {said[0].strip()[:200]}" if said else f"squeue ended with {answer.status}")
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
    job, own, index, word, start, end, reason, after = fields
    state = states.get(word, "unknown")
    ends = read_time(end)
    if word == "COMPLETING" and _is_to_come(ends):
        state, reason = "queued", "it is queued again, and its last start is still ending"
    if state == "queued" and any(text in reason for text in _HELD):
        state = "held"
    why = "" if reason in {"None", "", "NonZeroExitCode"} else reason
    if state in {"queued", "held"} and reason.startswith("Dependency") and (jobs := _read_after(after)):
        why = f"waits for {jobs}" if reason == "Dependency" else f"{why}: it waits for {jobs}"
    if word in _SAYS_WHY:
        why = f"{word}: {why}" if why else word
    return JobFound(_read_id(job, own, index), state, _printable(why), read_time(start), ends)


def _read_id(job: str, own: str, index: str) -> JobId:
    if index == "N/A":
        return JobId(job, job)
    index = index.partition("%")[0]
    return JobId(f"{job}_{index}" if index.isdecimal() else f"{job}_[{index}]", job, index, "" if own == job else own)


def _is_to_come(ends: int | None) -> bool:
    """Whether an end, as squeue shows it, is that of a start to come: one that ends for good has its end behind it."""
    import time

    return ends is None or ends > time.time()


def _read_after(text: str) -> str:
    """The ids in `afterany:12(unfulfilled),afterok:13_*(failed)`."""
    import re

    return ", ".join(re.findall(r":(\d+)(?:_\*|[+]\d+)*\(", text) or re.findall(r"\bafter\w*:(\d+)", text))


def read_time(text: str) -> int | None:
    """`2026-11-21T02:12:37`, in this host's time."""
    import time

    try:
        return int(time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S")))
    except (ValueError, OverflowError):  # N/A, Unknown, NONE
        return None


def _printable(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)
