"""Grid Engine's jobs as text: what `qstat -u USER -xml` prints. It shows no job that has ended."""

from __future__ import annotations

from hpcddp.record import TYPE_CHECKING
from hpcddp.schedulers.job_id import JobId
from hpcddp.schedulers.row import JobFound, JobsFound

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpcddp.schedulers.row import Answer


def parse_jobs(answer: Answer, states: Mapping[str, str]) -> JobsFound:
    """The jobs of an answer. `states`: its letters -> our word."""
    from xml.etree import ElementTree  # the scheduler's own answer; expat refuses entities that explode

    try:
        root = ElementTree.fromstring(answer.stdout.strip())  # noqa: S314  # the same
    except ElementTree.ParseError:
        said = [line.strip() for line in answer.stderr.splitlines() if line.strip()]
        return JobsFound((), f"qstat: {said[0][:200]}" if said else "qstat's answer cannot be read")
    if root.tag != "job_info":
        return JobsFound((), "qstat's answer cannot be read")
    jobs = []
    for one in root.iter("job_list"):
        told = {field.tag: (field.text or "").strip() for field in one}
        job, letters = told.get("JB_job_number", ""), told.get("state", "")
        if not job.isdecimal():
            continue
        state = states.get(letters) or _guess(letters)
        why = "an error came before it started: qstat -j says which" if letters.startswith("E") else ""
        for index in told.get("tasks", "").split(","):  # `3`, `4-6:1`, `2-4:1,6`
            own = JobId(f"{job}.{index}" if index else job, job, index)
            jobs.append(JobFound(own, state, why, _time(told.get("JAT_start_time", ""))))
    return JobsFound(tuple(jobs))


def _guess(letters: str) -> str:
    """Letters stand together: a job that is deleted, suspended, held, waiting or running, in this order."""
    for letter, state in (("d", "exiting"), ("s", "suspended"), ("S", "suspended"), ("T", "suspended"), ("h", "held")):
        if letter in letters:
            return state
    return "running" if "r" in letters or "t" in letters else "queued" if "q" in letters else "unknown"


def _time(text: str) -> int | None:
    """`2026-11-21T02:12:37`, in this host's time; newer releases add milliseconds."""
    import time

    try:
        return int(time.mktime(time.strptime(text.partition(".")[0], "%Y-%m-%dT%H:%M:%S")))
    except (ValueError, OverflowError):
        return None
