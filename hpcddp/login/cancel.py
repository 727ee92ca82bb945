"""The end of runs: what waits is taken back first, so that nothing starts any more; what runs saves and stops, or is
killed."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence

from hpcddp.errors import SchedulerError
from hpcddp.login.background import end_job, find_jobs
from hpcddp.login.find_run import call_run
from hpcddp.login.found_jobs import index_jobs, is_job, jobs_of
from hpcddp.login.run_facts import RunFacts, owners_of, read_facts
from hpcddp.login.run_status import LIVE, WAITS
from hpcddp.runs.folder import RunFolder, job_of, show_path
from hpcddp.runs.sweep_folder import list_points
from hpcddp.schedulers.registry import find_scheduler
from hpcddp.schedulers.row import Commands, JobFound
from hpcddp.schedulers.run import ask_jobs, run_program

_AT_ONCE = 500  # ids of one command
# Of what such a command prints: that there is nothing to cancel, and that it was done.
_OVER = ("has finished", "Unknown Job Id", "already completing", "Invalid job id", "does not exist")
_DONE = ("has registered the job", "has deleted job")


def cancel_runs(runs: Sequence[RunFolder], env: Mapping[str, str], *, now: bool) -> list[str]:
    """End all jobs of these runs; what was done, one line each. `now`: what runs is killed.

    SchedulerError if the scheduler does not say which of them live, or refuses to end one.
    """
    each = {os.path.abspath(run.path): run for one in runs for run in (one, *list_points(one))}
    facts = [read_facts(run) for run in each.values()]
    told = _cancel_here(facts, now=now)
    asked: dict[str, dict[str, None]] = {}
    for fact in facts:
        for scheduler, job in (*fact.open_jobs, *fact.again):
            if not find_scheduler(scheduler).this_machine:
                asked.setdefault(scheduler, {})[job] = None
    for scheduler, ids in asked.items():
        found = ask_jobs(scheduler, list(ids), env, owners_of(facts))
        if found.problem and not found.jobs:
            title = find_scheduler(scheduler).title
            raise SchedulerError(f"{found.problem}; nothing of {title}'s was cancelled", "again in a while")
        index = {scheduler: index_jobs(found.jobs)}
        jobs = {
            (one.id, one.array_index): (one, fact)
            for fact in facts
            for name, job in (*fact.open_jobs, *fact.again)
            if name == scheduler
            for one in jobs_of(index, scheduler, job)
            if one.state in (WAITS if (name, job) in fact.again else LIVE)
        }
        told += _cancel(scheduler, list(jobs.values()), env, now=now)
    return told or [f"{_listed([call_run(run) for run in runs])}: nothing waits or runs"]


def _cancel(
    scheduler: str, jobs: Sequence[tuple[JobFound, RunFacts]], env: Mapping[str, str], *, now: bool
) -> list[str]:
    commands = find_scheduler(scheduler).commands
    waiting = [name for job, _ in jobs if job.state in WAITS for name in _spell(job, commands)]
    told = []
    if waiting:
        _run_all(commands.cancel, waiting, env)
        told.append(f"{_listed(waiting)} will not start")
    running = [(job, fact) for job, fact in jobs if job.state not in WAITS and job.state != "exiting"]
    by_hand = [fact for _, fact in running if _is_by_hand(fact)]
    running = [(job, fact) for job, fact in running if not _is_by_hand(fact)]
    told += [_ask_by_folder(fact, now=now) for fact in by_hand]
    if now and running:
        names = [name for job, _ in running for name in _spell(job, commands)]
        _run_all(commands.cancel, names, env)
        return [*told, f"{_listed(names)} {'is' if len(names) == 1 else 'are'} killed"]
    errors = []
    for job, fact in running:
        try:
            told.append(_stop(job, fact, commands, env))
        except SchedulerError as error:  # it takes no other job away
            errors.append(error)
    if errors:
        raise SchedulerError("; ".join([*told, *(error.message for error in errors)]), errors[0].hint)
    return told


def _stop(job: JobFound, fact: RunFacts, commands: Commands, env: Mapping[str, str]) -> str:
    """Ask one job to save and end: by its scheduler's command, else through the run's folder."""
    stop, cancel, names = commands.stop, commands.cancel, _spell(job, commands)
    name = _listed(names)
    kills = f"hpcddp cancel {call_run(fact.run)} --now kills it"
    if stop and job.state != "suspended":  # there it would wait for the job to go on
        # not by its own id: that of the last one is the array's, for Slurm
        _run_all([word for word in stop if word != "{job}"], names, env, says_why=True)
        return f"{name} was asked to save and stop; {kills}"
    if fact.holder is not None and not fact.ended and is_job(job, fact.holder.job):
        path = _write_request(fact)
        if path:
            return f"{name} was asked to save and stop, through {path}; {kills}"
    _run_all(cancel, names, env)
    return f"{name} was cancelled by {cancel[0]}, which leaves it the scheduler's own grace"


def _is_by_hand(fact: RunFacts) -> bool:
    """Whether `hpcddp launch` started it in an allocation that is a person's, and not its own."""
    return fact.holder is not None and fact.holder.by_hand and not fact.ended


def _ask_by_folder(fact: RunFacts, *, now: bool) -> str:
    assert fact.holder is not None
    path = _write_request(fact)
    name = call_run(fact.run)
    done = f"was asked to save and stop, through {path}" if path else "cannot be asked: its folder cannot be written"
    more = f"; --now would end all of job {fact.holder.job}, in which it was launched by hand" if now else ""
    return f"{name} {done}{more}"


def _write_request(fact: RunFacts) -> str:
    """The path of the request to the supervisor; "" if it cannot be written."""
    assert fact.holder is not None
    path = fact.run.stop_request(job_of(fact.holder.attempt))
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="ascii"):
            return show_path(path)
    except OSError:
        return ""


def _run_all(command: Sequence[str], ids: Sequence[str], env: Mapping[str, str], *, says_why: bool = False) -> None:
    """SchedulerError if the command fails, for another reason than that a job has ended meanwhile. `says_why`: it does
    where it has failed (of one job of an array scancel ends with 229 and no word, and has signalled it)."""
    for at in range(0, len(ids), _AT_ONCE):
        words = [*command, *ids[at : at + _AT_ONCE]]
        answer = run_program(words, env)
        said = [line.strip() for line in f"{answer.stderr}\n{answer.stdout}".splitlines() if line.strip()]
        said = [line for line in said if not any(text in line for text in _DONE)]
        if answer.status and (said or not says_why) and not (said and all(_is_over(line) for line in said)):
            raise SchedulerError(f"{words[0]}: {'; '.join(said[:3])[:300] or answer.status}", shlex.join(words)[:300])


def _is_over(line: str) -> bool:
    """Whether a command says that a job has ended: then there is nothing to cancel."""
    return any(text in line for text in _OVER)


def _spell(job: JobFound, commands: Commands) -> list[str]:
    """The ids by which a command takes one job, or the jobs of an array that wait together."""
    if not job.array_index:
        return [job.id]
    if not commands.of_index:
        return [job.own_id or job.id]
    if commands.of_indices and not job.array_index.isdecimal():
        return [commands.of_indices.format(job=job.id, index=job.array_index)]
    return [commands.of_index.format(job=job.id, index=index) for index in job.array_index.split(",")]


def _cancel_here(facts: Sequence[RunFacts], *, now: bool) -> list[str]:
    """The jobs in the background of this machine, those that wait first."""
    own = [
        (submission, fact)
        for fact in facts
        for submission in fact.submissions
        if find_scheduler(submission.scheduler).this_machine
        and (submission.scheduler, submission.job) in fact.open_jobs
    ]
    found = {job.id: job for job in find_jobs([submission for submission, _ in own])}
    told = []
    for wanted in (True, False):
        for submission, fact in own:
            job = found.get(submission.job)
            if job is None or (job.state in WAITS) is not wanted:
                continue
            if job.state == "unknown":
                told.append(f"{submission.job}: {job.reason}")
            elif end_job(submission, kill=now):
                kills = f"hpcddp cancel {call_run(fact.run)} --now kills it"
                done = "will not start" if wanted else "is killed" if now else f"was asked to save and stop; {kills}"
                told.append(f"{submission.job} {done}")
    return told


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
