"""The end of runs: what waits is taken back first; what runs saves and stops, or is ended as its scheduler does."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence

from hpcddp.errors import SchedulerError
from hpcddp.login.background import end_job, end_process
from hpcddp.login.find_run import format_run
from hpcddp.login.judge import WAITING, ask_schedulers, judge
from hpcddp.login.on_disk import RunJob, read_on_disk
from hpcddp.record import Record
from hpcddp.runs.folder import RunFolder, job_of, show_path
from hpcddp.runs.lock import release_run
from hpcddp.runs.submitted import list_sweep_runs
from hpcddp.schedulers.registry import find_scheduler
from hpcddp.schedulers.row import Commands, JobFound
from hpcddp.schedulers.run import run_program

_AT_ONCE = 500  # ids of one command


class _LiveJob(Record):
    run: RunFolder
    job: RunJob
    found: JobFound

    @property
    def name(self) -> str:
        return str(self.found.id)

    @property
    def waits(self) -> bool:
        return self.found.state in WAITING

    @property
    def is_by_hand(self) -> bool:
        return self.job.holder is not None and self.job.holder.by_hand


def cancel_runs(runs: Sequence[RunFolder], env: Mapping[str, str], *, now: bool) -> list[str]:
    """End all jobs of these runs; what was done, one line each. `now`: what runs is ended by its scheduler's own
    command, or killed on this machine. SchedulerError."""
    each = {os.path.abspath(run.path): run for one in runs for run in (one, *list_sweep_runs(one))}
    read = [read_on_disk(run) for run in each.values()]
    answers = ask_schedulers(read, env)
    found = [_LiveJob(run.run, *pair) for run in read for pair in judge(run, answers).live]
    known = {(one.job.scheduler, one.found.id): one for one in found}  # a sweep and its run know the same job
    live = list(known.values())
    lines = [line for waits in (True, False) for one in live for line in _end_here(one, now=now, waits=waits)]
    for scheduler in dict.fromkeys(job.scheduler for run in read for job in run.jobs if not job.is_here):
        jobs = [one for one in live if one.job.scheduler == scheduler and not one.job.is_here]
        row, problem = find_scheduler(scheduler), answers.problems.get(scheduler)
        if problem and all(one.found.state == "unknown" for one in jobs):
            raise SchedulerError(f"{problem}; nothing of {row.title}'s was cancelled", "again in a while")
        lines += _cancel(row.commands, jobs, env, now=now)
    return lines or [f"{_listed([format_run(run) for run in runs])}: nothing waits or runs"]


def _cancel(commands: Commands, jobs: Sequence[_LiveJob], env: Mapping[str, str], *, now: bool) -> list[str]:
    lines, errors = list[str](), list[SchedulerError]()
    waiting = [one.name for one in jobs if one.waits and not one.is_by_hand]
    running = [one for one in jobs if not (one.waits or one.is_by_hand or one.found.state == "exiting")]
    if waiting:
        _run_all(commands, commands.cancel, waiting, env)
        lines.append(f"{_listed(waiting)} will not start")
    lines += [_ask_by_folder(one, commands) for one in jobs if one.is_by_hand]
    if now and running:
        return [*lines, _end_by_scheduler([one.name for one in running], commands, env)]
    for one in running:
        try:
            lines.append(_stop(one, commands, env))
        except SchedulerError as error:  # it takes no other job away
            errors.append(error)
    if errors:
        raise SchedulerError("; ".join([*lines, *(error.message for error in errors)]), errors[0].hint)
    return lines


def _stop(one: _LiveJob, commands: Commands, env: Mapping[str, str]) -> str:
    ends = f"hpcddp cancel {format_run(one.run)} --now ends it as {commands.cancel[0]} does"
    if commands.stop and one.found.state != "suspended":  # there it would wait for the job to go on
        _run_all(commands, [word for word in commands.stop if word != "{job}"], [one.name], env)
        return f"{one.name} was asked to save and stop; {ends}"
    if path := _write_request(one):
        return f"{one.name} was asked to save and stop, through {path}; {ends}"
    return _end_by_scheduler([one.name], commands, env)


def _end_by_scheduler(names: Sequence[str], commands: Commands, env: Mapping[str, str]) -> str:
    """End jobs by the scheduler's command, without SIGKILL: Slurm waits for KillWait even at `--full --signal=KILL`."""
    _run_all(commands, commands.cancel, names, env)
    was, it = ("was", "it") if len(names) == 1 else ("were", "them")
    return f"{_listed(names)} {was} cancelled by {commands.cancel[0]}, which leaves {it} the scheduler's own grace"


def _ask_by_folder(one: _LiveJob, commands: Commands) -> str:
    name, path, job = format_run(one.run), _write_request(one), str(one.job.id)
    done = (
        f"was asked to save and stop, through {path}" if path else f"cannot be asked to stop: it is {one.found.state}"
    )
    ends = shlex.join([*commands.cancel, job])
    return f"{name} {done}; to end all of job {job}, in which it was launched by hand: {ends}"


def _write_request(one: _LiveJob) -> str:
    """The path of the request to the supervisor; "" if it cannot be written, or nobody would read it."""
    holder = one.job.holder
    if holder is None or not one.job.holds:
        return ""
    path = one.run.stop_request(job_of(holder.attempt))
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="ascii"):
            return show_path(path)
    except OSError:
        return ""


def _end_here(one: _LiveJob, *, now: bool, waits: bool) -> list[str]:
    job, found = one.job, one.found
    if not job.is_here or one.waits is not waits:
        return []
    kills = f"hpcddp cancel {format_run(one.run)} --now kills it"
    if found.state == "unknown":
        path = "" if now else _write_request(one)
        more = f"; it was asked to save and stop, through {path}" if path else ""
        return [f"{job.id}: {found.reason}{more}"]
    if job.submission is not None:
        was_there = end_job(job.submission, kill=now)
    else:
        was_there = job.holder is not None and end_process(one.run, job.holder, kill=now)
    if now and was_there and job.holder is not None:
        release_run(one.run, job.holder.attempt, signal="SIGKILL")  # nothing of it lives to say so
    done = "will not start" if waits else "is killed" if now else f"was asked to save and stop; {kills}"
    return [f"{job.id} {done}"] if was_there else []


def _run_all(commands: Commands, command: Sequence[str], ids: Sequence[str], env: Mapping[str, str]) -> None:
    """SchedulerError if the command fails and says why, but for a job that has ended meanwhile."""
    for at in range(0, len(ids), _AT_ONCE):
        words = [*command, *ids[at : at + _AT_ONCE]]
        answer = run_program(words, env)
        written = filter(None, map(str.strip, f"{answer.stderr}\n{answer.stdout}".splitlines()))
        lines = [line for line in written if not any(text in line for text in commands.cancelled)]
        is_over = all(any(text in line for text in commands.over) for line in lines)  # then there is nothing to cancel
        if answer.status and not is_over:
            raise SchedulerError(f"{words[0]}: {'; '.join(lines[:3])[:300]}", shlex.join(words)[:300])


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
