"""What the folder of a run says of it: how far it is, how it ended, and which jobs may write it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress

from hpcddp.errors import HpcddpError
from hpcddp.login.find_run import find_array_jobs
from hpcddp.record import Record
from hpcddp.runs.chain import Turn, find_unfinished_runs
from hpcddp.runs.folder import AttemptFolder, RunFolder, job_of, list_attempts, list_holders, show_path
from hpcddp.runs.jsonfile import read_first_line, read_record
from hpcddp.runs.lock import Holder, HolderEnd, describe_process, has_ended, read_holder, read_holder_end
from hpcddp.runs.metrics import Latest, read_latest
from hpcddp.runs.state import Best, RunState, read_best, read_plan_file, read_state
from hpcddp.runs.submitted import Submission, read_job_end, read_submissions
from hpcddp.schedulers.job_id import JobId, parse_id
from hpcddp.schedulers.registry import find_scheduler

_NOTHING: Mapping[str, HolderEnd | None] = {}


class RunJob(Record):
    """A job that may write the run. `scheduler`: "" of a process without one. `holder`: its last hold of the run; None:
    it has not holders. `holds`: that hold is not known to be over. `is_alive`: whether its process is seen on this
    machine; None: it cannot be seen. `before`: of a chain's job, the one that has queued it."""

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
    """What the folder of one run says. `holder`: the last one; `ended`: whether it has said that it ended, with this
    status, by this signal and for this cause. `left`: the runs that the script of its job has opened itself and left
    unfinished. `ends_of_attempts`: what each that has held the run said at its end; None: nothing."""

    run: RunFolder
    state: RunState | None
    holder: Holder | None
    ended: bool
    exit_status: int | None
    signal: str
    cause: str
    submissions: tuple[Submission, ...]
    jobs: tuple[RunJob, ...]
    links: tuple[int, int]
    latest: Latest
    point: str
    best: Best | None = None
    ends: int | None = None  # of the job that holds it, as its supervisor wrote
    problem: str = ""
    left: str = ""
    ends_of_attempts: Mapping[str, HolderEnd | None] = _NOTHING

    @property
    def is_finished(self) -> bool:
        """Whether the ranks said so, and their job has ended."""
        return self.state is not None and self.state.status == "finished" and self.ended and not self.left

    @property
    def is_done(self) -> bool:
        """Whether nothing of it is left to do: what its job has behind the training has ended well, too."""
        return self.is_finished and not (self.exit_status or self.signal or self.cause)

    @property
    def lost(self) -> str:
        """Why the last attempt has lost ranks; "" if it has not."""
        return read_lost(self.run.attempt(self.holder.attempt)) if self.holder is not None else ""


def read_lost(attempt: AttemptFolder) -> str:
    """Why this attempt has lost ranks; "" if it has not, or that cannot be read."""
    with suppress(HpcddpError):
        return read_first_line(attempt.lost)
    return ""


def read_on_disk(run: RunFolder) -> OnDisk:
    """Asks nobody. What cannot be read is in `problem`."""
    state, best, problem, point = None, None, "", ""
    try:
        state = read_state(run)
        best = read_best(run.checkpoints)
        point = " ".join(f"{k}={v}" for k, v in (read_plan_file(run).point or {}).items())
    except HpcddpError as error:
        problem = str(error)
    held = [(path, holder) for path in list_holders(run) if (holder := read_holder(path)) is not None]
    last, holder = held[-1] if held else ("", None)
    end = read_holder_end(last) if last else HolderEnd()
    ended, end = end is not None, end or HolderEnd()
    attempts = list_attempts(run)
    latest, ends = Latest(), None
    if holder is not None:
        current = run.attempt(holder.attempt)
        latest = read_latest(current.metrics)
        with suppress(HpcddpError):
            told = read_job_end(current)
            ends = told.ends if told is not None else None
    submissions = tuple(read_submissions(run))
    left = _find_left(run, state, holder)
    is_done = ended and not left and state is not None and state.status == "finished"
    return OnDisk(
        run,
        state,
        holder,
        ended,
        *end,
        submissions,
        tuple(_list_jobs(run, held, submissions, attempts, is_done=is_done)),
        _read_links(run.attempt(holder.attempt)) if holder is not None else (0, 0),
        latest,
        point,
        best,
        ends,
        problem,
        left,
        {holder.attempt: read_holder_end(path) for path, holder in held},
    )


def _list_jobs(
    run: RunFolder,
    held: Sequence[tuple[str, Holder]],
    submissions: Sequence[Submission],
    attempts: Sequence[AttemptFolder],
    *,
    is_done: bool,
) -> list[RunJob]:
    """Every job that may write the run, each once, the one that held it last first. Those that have held it and are
    over for good are left out: of a run that is done, and where the job that was to follow has begun."""
    holders: dict[str, RunJob] = {}  # by the job's part of its attempts' names
    for path, holder in held:
        name = job_of(holder.attempt)
        is_last = path == held[-1][0]
        alive = _is_alive(holder) if is_last else False
        holds = is_last and alive is not False and read_holder_end(path) is None
        holders.pop(name, None)
        holders[name] = RunJob(holder.scheduler, holder.id, holder, holds, alive)
    waiting = {
        one.job: RunJob(one.scheduler, parse_id(one.job), submission=one) for one in submissions if not one.array
    }
    waiting |= {str(job): RunJob(scheduler, job) for scheduler, job in find_array_jobs(run)}
    followed = set[str]()
    for attempt in attempts:
        if follows := read_first_line(attempt.next):
            before = holders.get(job_of(attempt.name))
            job = RunJob(before.scheduler if before else "", parse_id(follows), before=str(before.id) if before else "")
            waiting.setdefault(follows, job)
            if any(one.id.is_same(job.id) for one in holders.values()):
                followed.add(job_of(attempt.name))
    jobs = []
    for name, one in reversed(holders.items()):
        submitted = next((job.submission for job in waiting.values() if one.id.is_same(job.id)), None)
        if one.holds or not (is_done or name in followed):
            jobs.append(one._replace(submission=submitted))
    left = [one for one in waiting.values() if not any(other.id.is_same(one.id) for other in holders.values())]
    # an array's own folder is held by none of its jobs
    left += [RunJob(one.scheduler, parse_id(one.job), submission=one) for one in submissions if one.array]
    return jobs + [one for one in left if one.scheduler]


def _is_alive(holder: Holder) -> bool | None:
    """Whether its process is seen on this machine; None: only its scheduler may know."""
    mine = describe_process("", os.getpid(), {}, ())
    ended = has_ended(holder, mine, lambda _scheduler, _job: None)
    return None if ended is None else not ended


def _read_links(attempt: AttemptFolder) -> tuple[int, int]:
    """The number of this attempt's job in its chain, and of how many at most; (0, 0): it belongs to none."""
    with suppress(HpcddpError):
        turn = read_record(attempt.chain, Turn)
        return (0, 0) if turn is None else (turn.turn, turn.of)
    return 0, 0


def _find_left(run: RunFolder, state: RunState | None, holder: Holder | None) -> str:
    """In words; empty where the job's own run says enough."""
    left = []
    if holder is not None and (state is None or state.status == "finished"):
        with suppress(HpcddpError):
            left = find_unfinished_runs(run.attempt(holder.attempt))
    return "; ".join(f"run {show_path(own.path)}: step {one.step} ({one.reason})" for own, one in left)
