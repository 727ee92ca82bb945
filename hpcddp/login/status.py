"""What became of runs: the run folder and the scheduler together, by one question to each scheduler however many jobs.

The run folder says how far the training is and how it ended. The scheduler says what its jobs wait for, and how long
they have. A scheduler that does not answer takes nothing away from what the folder says.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from hpcddp.errors import HpcddpError
from hpcddp.login.background import find_jobs
from hpcddp.login.found_jobs import FoundJobs, index_jobs, is_job, jobs_of
from hpcddp.login.run_facts import RunFacts, find_sweep, owners_of, read_facts
from hpcddp.login.run_status import LIVE, WAITS, RunStatus, Statuses
from hpcddp.login.sweep_status import complete_sweeps, judge_sweep
from hpcddp.runs.folder import RunFolder
from hpcddp.runs.holder import describe_process, has_ended
from hpcddp.runs.state import correct_killed
from hpcddp.runs.sweep_folder import list_points
from hpcddp.schedulers.registry import find_scheduler
from hpcddp.schedulers.row import JobFound
from hpcddp.schedulers.run import ask_jobs


def find_status(runs: Sequence[RunFolder], env: Mapping[str, str]) -> Statuses:
    """The status of each run, in this order; a sweep is followed by its runs."""
    each: dict[str, RunFolder] = {}
    sweeps: dict[str, str] = {}
    problems = []
    for one in runs:
        points: list[RunFolder] = []
        try:
            points = list_points(one)
        except HpcddpError as error:
            problems.append(str(error))
        each |= {os.path.abspath(run.path): run for run in (one, *points)}
        sweeps |= {os.path.abspath(run.path): one.path for run in points}
    facts = [read_facts(run) for run in each.values()]
    asked: dict[str, dict[str, None]] = {}
    for fact in facts:
        for scheduler, job in (*fact.open_jobs, *fact.again):
            asked.setdefault(scheduler, {})[job] = None
    jobs: dict[str, list[JobFound]] = {}
    problems += [fact.problem for fact in facts if fact.problem]
    is_damaged = bool(problems)
    for scheduler, ids in asked.items():
        if find_scheduler(scheduler).this_machine:
            own = {s.job: s for fact in facts for s in fact.submissions if s.job in ids}
            jobs[scheduler] = find_jobs(list(own.values()))
            continue
        found = ask_jobs(scheduler, list(ids), env, owners_of(facts))
        if found.problem:
            problems.append(f"{found.problem}; what the run folders say is shown")
        jobs[scheduler] = list(found.jobs)
        if found.problem:  # what is not in the answer may live all the same
            shown = {scheduler: index_jobs(found.jobs)}
            missing = [job for job in ids if not jobs_of(shown, scheduler, job)]
            jobs[scheduler] += [JobFound(job, "unknown", reason="the scheduler does not answer") for job in missing]
    index = {name: index_jobs(found) for name, found in jobs.items()}
    judged = [_judge(fact, index)._replace(sweep=sweeps.get(path, "")) for path, fact in zip(each, facts, strict=True)]
    return Statuses(tuple(complete_sweeps(judged)), tuple(problems), is_damaged)


def is_alive(run: RunFolder, env: Mapping[str, str]) -> bool:
    """Whether a job of the run waits or runs, or may."""
    return any(one.state in LIVE for one in find_status([run], env).runs)


def _judge(fact: RunFacts, jobs: FoundJobs) -> RunStatus:
    name = os.path.basename(os.path.abspath(fact.run.path))
    base = RunStatus(name, fact.run.path, "unknown", links=fact.links, point=fact.point)
    if (sweep := find_sweep(fact)) is not None:
        return judge_sweep(base, fact, jobs, sweep)
    base = _with_progress(base, fact)
    found = [job for scheduler, one in fact.open_jobs for job in jobs_of(jobs, scheduler, one)]
    runs_now = next((job for job in found if job.state in LIVE and job.state not in WAITS), None)
    if runs_now is not None or _is_held_now(fact):
        job = runs_now
        state = job.state if job is not None else "running"
        own = _name(job) if job is not None else fact.holder.job if fact.holder is not None else ""
        if fact.holder is None:  # it has started, and its supervisor has not yet
            starts = "it starts" if _is_supervised(fact) else ""
            why = job.reason if job is not None and job.state == "unknown" else starts
            return base._replace(state=state, job=own, why=why, ends=job.ends if job is not None else None)
        return base._replace(
            state=state,
            job=own or (fact.holder.attempt if fact.holder is not None else ""),
            ends=job.ends if job is not None and job.ends is not None else fact.ends,
            why=job.reason if job is not None and job.state == "unknown" else "",
        )
    again = [job for scheduler, one in fact.again for job in jobs_of(jobs, scheduler, one)]
    waits = next((job for job in (*found, *again) if job.state in WAITS), None)
    if waits is not None and not _is_finished(fact):
        return base._replace(state=waits.state, job=_name(waits), starts=waits.starts, why=waits.reason, left_s=None)
    return _judge_ended(base, fact, [*found, *again])


def _judge_ended(base: RunStatus, fact: RunFacts, found: Sequence[JobFound]) -> RunStatus:
    """No job of the run lives: what the ranks wrote last, else how the job ended."""
    last = fact.holder.job or fact.holder.attempt if fact.holder is not None else ""
    base = base._replace(job=last, left_s=None, exit_status=fact.exit_status)
    if fact.left:
        return base._replace(state="unfinished", why=fact.left)
    if fact.state is not None:
        state = correct_killed(fact.run, fact.state, lambda: False)
        return base._replace(
            state=state.status,
            step=state.step,
            epoch=state.epoch,
            why=state.reason,
            weights_sha256=state.weights_sha256,
            exact=state.exact,
        )
    job = next(iter(found), None)
    if fact.holder is None:
        if not fact.submissions:
            return base._replace(state="unknown", why="no job of this run is known")
        queued = fact.submissions[-1]
        base = base._replace(job=queued.job)
        if job is not None:
            early = "it ended before its script began" if queued.supervised else ""
            return base._replace(state=job.state, why=job.reason or early, exit_status=job.status)
        if not queued.supervised:
            return base._replace(state="ended", why="supervise: false leaves no word of how")
        return base._replace(state="cancelled", why="its scheduler does not know it any more, and it has not started")
    if fact.ended and fact.exit_status is not None:
        own = next((one for one in found if is_job(one, fact.holder.job) and one.state not in LIVE), None)
        taken = own is not None and own.state == "cancelled"
        state_word = "finished" if fact.exit_status == 0 else "cancelled" if taken else "failed"
        said = own.reason if own is not None else ""
        why = "" if fact.exit_status == 0 else "; ".join(filter(None, [f"exit status {fact.exit_status}", said]))
        return base._replace(state=state_word, why=why)
    if job is not None:
        return base._replace(state=job.state, why=job.reason, exit_status=job.status)
    return base._replace(state="failed", why="its job was killed: it left no exit status, and no state")


def _with_progress(base: RunStatus, fact: RunFacts) -> RunStatus:
    latest = fact.latest
    step = latest.step if latest.step is not None else fact.state.step if fact.state is not None else None
    return base._replace(
        step=step,
        total_steps=latest.total,
        epoch=latest.epoch,
        loss=latest.loss,
        best=fact.best.value if fact.best is not None else None,
        best_mode=fact.best.mode if fact.best is not None else "",
        samples_per_s=latest.samples_per_s,
        left_s=latest.left_s,
    )


def _name(job: JobFound) -> str:
    """The id that stands for this job alone."""
    own = f"{job.id}_{job.array_index}" if job.array_index.isdecimal() else job.id
    is_own = job.own_id not in {"", job.id}  # Slurm gives the last job of an array the array's id
    return (job.own_id if is_own else own) if job.array_index else job.id


def _is_held_now(fact: RunFacts) -> bool:
    """Whether the last holder's process lives, as far as it can be seen here."""
    if fact.holder is None or fact.ended:
        return False
    mine = describe_process("", os.getpid(), {}, ())
    return has_ended(fact.holder, mine, lambda _scheduler, _job: None) is False


def _is_supervised(fact: RunFacts) -> bool:
    """Whether its newest job leaves word of itself in the run's folder."""
    return not fact.submissions or fact.submissions[-1].supervised


def _is_finished(fact: RunFacts) -> bool:
    return fact.state is not None and fact.state.status == "finished" and fact.ended and not fact.left
