"""The folder of a run, read: how far the run is, how it ended, and which jobs may write it."""

from __future__ import annotations

from contextlib import suppress

from hpcddp.errors import HpcddpError
from hpcddp.login.find_run import find_array_jobs
from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.runs.chain import find_unfinished_runs, read_link
from hpcddp.runs.folder import AttemptFolder, RunFolder, job_of, list_attempts, show_path
from hpcddp.runs.jsonfile import read_first_line
from hpcddp.runs.lock import Hold, Holder, HolderEnd, read_holds
from hpcddp.runs.metrics import Latest, read_latest
from hpcddp.runs.state import Best, RunState, read_best, read_plan_file, read_state
from hpcddp.runs.submitted import JobEnd, Submission, read_job_end, read_submissions
from hpcddp.schedulers.job_id import JobId, parse_id
from hpcddp.schedulers.registry import find_scheduler

if TYPE_CHECKING:
    from collections.abc import Sequence


class RunJob(Record):
    """A job that may write the run. `scheduler`: "" of a process without one. `holder`: its last hold of the run.
    `holds`: that hold is not known to be over. `is_alive`: whether its process is seen on this machine; None: it cannot
    be seen. `before`: of a chain's job, the one that has queued it."""

    scheduler: str
    id: JobId
    holder: Holder | None = None
    holds: bool = False
    is_alive: bool | None = None
    submission: Submission | None = None
    before: str = ""

    @property
    def is_here(self) -> bool:
        """Whether this machine says what became of it, and no scheduler."""
        return not self.scheduler or find_scheduler(self.scheduler).this_machine


class OnDisk(Record):
    """The content of a run's folder. `links`: the number of the job in its chain, and the most. `job_end`: of the job
    that holds it. `left`: runs that its script has opened and left unfinished. `problem`: what cannot be read."""

    run: RunFolder
    state: RunState | None = None
    holds: Sequence[Hold] = ()
    submissions: Sequence[Submission] = ()
    jobs: Sequence[RunJob] = ()
    links: tuple[int, int] = (0, 0)
    latest: Latest = Latest()
    point: str = ""
    best: Best | None = None
    job_end: JobEnd | None = None
    left: str = ""
    problem: str = ""

    @property
    def holder(self) -> Holder | None:
        return self.holds[-1].holder if self.holds else None

    @property
    def ended(self) -> bool:
        return not self.holds or self.holds[-1].end is not None

    @property
    def end(self) -> HolderEnd:
        return (self.holds[-1].end if self.holds else None) or HolderEnd()

    @property
    def is_finished(self) -> bool:
        """Whether the ranks said so, and their job has ended."""
        return self.state is not None and self.state.status == "finished" and self.ended and not self.left

    @property
    def attempt(self) -> AttemptFolder | None:
        return self.run.attempt(self.holds[-1].holder.attempt) if self.holds else None

    @property
    def lost(self) -> str:
        return read_lost(self.attempt) if self.attempt is not None else ""


def read_lost(attempt: AttemptFolder) -> str:
    """Why this attempt has lost ranks; "" if it has not, or that cannot be read."""
    with suppress(HpcddpError):
        return read_first_line(attempt.lost)
    return ""


def read_on_disk(run: RunFolder) -> OnDisk:
    """Read the folder of a run. What cannot be read is in `problem`."""
    one = OnDisk(run, holds=read_holds(run), submissions=read_submissions(run))
    try:
        one = one._replace(state=read_state(run))
        one = one._replace(best=read_best(run.checkpoints))
        one = one._replace(point=" ".join(f"{k}={v}" for k, v in (read_plan_file(run).point or {}).items()))
    except HpcddpError as error:
        one = one._replace(problem=str(error))
    if (attempt := one.attempt) is not None:
        one = one._replace(latest=read_latest(attempt.metrics))
        with suppress(HpcddpError):
            one = one._replace(job_end=read_job_end(attempt))
            if (link := read_link(attempt)) is not None:
                one = one._replace(links=(link.turn, link.of))
            is_open = one.state is None or one.state.status == "finished"
            left = find_unfinished_runs(attempt) if is_open else []  # else its own run says enough
            texts = (f"run {show_path(other.path)}: step {state.step} ({state.reason})" for other, state in left)
            one = one._replace(left="; ".join(texts))
    return one._replace(jobs=_list_jobs(one))


def _list_jobs(one: OnDisk) -> list[RunJob]:
    """Every job that may write the run, each once, the last holder first. Holders that are over for good are left
    out."""
    holders: dict[str, RunJob] = {}  # by the job's part of its attempts' names
    for hold in one.holds:
        name = job_of(hold.holder.attempt)
        is_last = hold == one.holds[-1]
        alive = hold.holder.lives if is_last else False
        holders.pop(name, None)
        holds = is_last and alive is not False and hold.end is None
        holders[name] = RunJob(hold.holder.scheduler, hold.holder.id, hold.holder, holds, alive)
    waiting = {
        job.job: RunJob(job.scheduler, parse_id(job.job), submission=job) for job in one.submissions if not job.array
    }
    waiting |= {str(job): RunJob(scheduler, job) for scheduler, job in find_array_jobs(one.run)}
    followed = set[str]()
    for attempt in list_attempts(one.run):
        if follows := read_first_line(attempt.next):
            before = holders.get(job_of(attempt.name))
            job = RunJob(before.scheduler if before else "", parse_id(follows), before=str(before.id) if before else "")
            waiting.setdefault(follows, job)
            if any(held.id.is_same(job.id) for held in holders.values()):
                followed.add(job_of(attempt.name))
    jobs = []
    for name, held in reversed(holders.items()):
        if held.holds or not (one.is_finished or name in followed):
            submission = next((job.submission for job in waiting.values() if held.id.is_same(job.id)), None)
            jobs.append(held._replace(submission=submission))
    jobs += [job for job in waiting.values() if not any(held.id.is_same(job.id) for held in holders.values())]
    # an array's own folder is held by none of its jobs
    jobs += [RunJob(job.scheduler, parse_id(job.job), submission=job) for job in one.submissions if job.array]
    return [job for job in jobs if job.scheduler or job.holder is not None]
