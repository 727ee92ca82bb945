"""What the folder of a run says of it and of its jobs, before any scheduler is asked."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress

from hpcddp.errors import HpcddpError
from hpcddp.login.find_run import find_waiting_point, is_same_job, own_job, read_follow_up
from hpcddp.record import Record
from hpcddp.runs.best import Best, read_best
from hpcddp.runs.folder import RunFolder, list_attempts, list_holders, list_runs, show_path
from hpcddp.runs.holder import Holder
from hpcddp.runs.job_end import read_job_end
from hpcddp.runs.jsonfile import read_object
from hpcddp.runs.latest import Latest, read_latest
from hpcddp.runs.lock import read_end, read_holder, read_holders
from hpcddp.runs.starts import find_left
from hpcddp.runs.state import State, read_state
from hpcddp.runs.submitted import Submission, read_submissions
from hpcddp.runs.sweep_folder import read_sweep


class RunFacts(Record):
    """What the folder of one run says. `open_jobs`: those that have not said that they ended."""

    run: RunFolder
    state: State | None
    holder: Holder | None  # with an id that is its own, also in an array
    ended: bool
    exit_status: int | None
    submissions: tuple[Submission, ...]
    open_jobs: tuple[tuple[str, str], ...]  # scheduler and id
    again: tuple[tuple[str, str], ...]  # the job that has ended and may wait once more: its scheduler starts it again
    links: tuple[int, int]
    latest: Latest
    point: str
    best: Best | None = None
    ends: int | None = None  # of the job that holds it, as its supervisor wrote
    problem: str = ""
    left: str = ""  # the runs that the script of its job has opened itself and left unfinished


def read_facts(run: RunFolder) -> RunFacts:
    submissions = tuple(read_submissions(run))
    state, best, problem, point, links = None, None, "", "", (0, 0)
    try:
        state = read_state(run)
        best = read_best(run.checkpoints)
        plan = read_object(run.plan) or {}
        values = plan.get("point")
        point = " ".join(f"{k}={v}" for k, v in values.items()) if isinstance(values, dict) else ""
    except HpcddpError as error:
        problem = str(error)
    holders = list_holders(run)
    held: list[tuple[Holder, bool, int | None]] = []
    for path in holders:
        holder = read_holder(path)
        if holder is not None:
            held.append((holder._replace(job=own_job(holder)), *read_end(path)))
    holder, ended, status = held[-1] if held else (None, True, None)
    over = {one.job for one, has_said, _ in held if has_said} | {one.job for one, _, _ in held[:-1]}
    scheduler = holder.scheduler if holder is not None else ""
    known = {one.job: one.scheduler for one in submissions}
    known |= {one.job: one.scheduler for one, _, _ in held if one.job}
    attempts = list_attempts(run)
    for attempt in attempts:
        follows = read_follow_up(attempt.next)
        if follows:
            known.setdefault(follows, scheduler)
        try:
            begun = read_object(attempt.chain) or {}
        except HpcddpError:
            begun = {}
        turn, most = begun.get("turn"), begun.get("of")
        if type(turn) is int and type(most) is int:
            links = max(links, (turn, most))
    open_jobs = tuple((name, job) for job, name in known.items() if name and not _is_over(job, over))
    if open_jobs:
        elsewhere = _jobs_of_siblings(run)
        open_jobs = tuple((name, job) for name, job in open_jobs if not _is_over(job, elsewhere))
    elif (waiting := find_waiting_point(run)) is not None:
        open_jobs = (waiting,)
    is_done = state.status != "unfinished" if state is not None else status == 0
    may_wait = holder is not None and ended and holder.job and not holder.by_hand and not is_done
    again = ((scheduler, holder.job),) if holder is not None and may_wait else ()
    latest, ends = Latest(), None
    if holder is not None:
        current = run.attempt(holder.attempt)
        latest = read_latest(current.metrics)
        with suppress(HpcddpError):
            told = read_job_end(current)
            ends = told.ends if told is not None else None
    return RunFacts(
        run,
        state,
        holder,
        ended,
        status,
        submissions,
        open_jobs,
        again,
        links,
        latest,
        point,
        best,
        ends,
        problem,
        _find_left(run, state, holder, status),
    )


def _find_left(run: RunFolder, state: State | None, holder: Holder | None, status: int | None) -> str:
    """In words; empty where the job's own run says enough."""
    left = []
    if holder is not None and (state is None or state.status == "finished"):
        with suppress(HpcddpError):
            left = find_left(run.attempt(holder.attempt), state, status or 0)
    return "; ".join(f"run {show_path(own.path)}: step {one.step} ({one.reason})" for own, one in left)


def _jobs_of_siblings(run: RunFolder) -> set[str]:
    """The jobs that hold or have held another run of this name, NAME-2: one that was submitted for this run, and was
    too late, has begun that one."""
    base = re.sub(r"-\d+$", "", run.path)
    others = {one.path: one for path in {base, run.path} for _, one in list_runs(path) if one.path != run.path}
    return {own_job(holder) for one in others.values() for holder in read_holders(one) if holder.job}


def _is_over(job: str, over: set[str]) -> bool:
    return job in over or any(is_same_job(job, other) for other in over if other)


def owners_of(facts: Sequence[RunFacts]) -> set[int]:
    """The users whose folders these runs are, by number: their jobs are theirs."""
    owners = set()
    for fact in facts:
        with suppress(OSError):
            owners.add(os.stat(fact.run.path).st_uid)
    return owners


def find_sweep(fact: RunFacts) -> tuple[dict[str, list[str]], str] | None:
    try:
        return read_sweep(fact.run)
    except HpcddpError:
        return None
