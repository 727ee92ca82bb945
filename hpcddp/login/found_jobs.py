"""The jobs that schedulers showed, by their ids: as they print them, with or without the server and the index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from hpcddp.login.find_run import is_same_job
from hpcddp.runs.sweep_folder import read_span
from hpcddp.schedulers.row import JobFound

#: scheduler -> the number in an id -> the jobs with that number
FoundJobs: TypeAlias = Mapping[str, Mapping[str, Sequence[JobFound]]]


def index_jobs(found: Sequence[JobFound]) -> dict[str, list[JobFound]]:
    """By the leading number of the id, which PBS follows by a server's name."""
    index: dict[str, list[JobFound]] = {}
    arrays = {job.id for job in found if job.array_index}
    for job in found:
        if not job.array_index and job.id in arrays:  # an array as a whole, beside its jobs
            continue
        for name in {_number(job.id), job.own_id or _number(job.id)}:
            index.setdefault(name, []).append(job)
    return index


def _number(job: str) -> str:
    head = job.partition(".")[0].partition("[")[0].partition("_")[0]
    return job if job.startswith("local-") else head


def jobs_of(jobs: FoundJobs, scheduler: str, job: str) -> Sequence[JobFound]:
    """What the scheduler shows of one job; of one of an array, its own, also where several wait together."""
    near = jobs.get(scheduler, {}).get(_number(job), ())
    found = [one for one in near if is_job(one, job)]
    return found or [one._replace(array_index=index, own_id="") for one in near if (index := _index_in(one, job))]


def _index_in(one: JobFound, job: str) -> str:
    """The job's index, if it is one of these that wait together; else ""."""
    index = job.rstrip("]").replace("[", "_").partition(".")[0].rpartition("_")[2]
    if not index.isdecimal():
        return ""
    spans = (read_span(part.partition("%")[0]) for part in one.array_index.split(","))
    return index if any(span is not None and len(span) > 1 and int(index) in span for span in spans) else ""


def is_job(one: JobFound, job: str) -> bool:
    """Whether it is the job with this id, or one of its indices."""
    return job in {one.id, one.own_id} or is_same_job(_whole(one), job) or is_same_job(one.id, job)


def _whole(job: JobFound) -> str:
    return f"{_number(job.id)}_{job.array_index}" if job.array_index else job.id
