"""From a plan to a job in the queue: its run's folder with script and plan, the id, what to say."""

from __future__ import annotations

import os
import re
import shlex
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from hpcddp.errors import HpcddpError, NoAnswerError, RequestError, SchedulerError
from hpcddp.login.background import end_job, name_job, output_of, start_job
from hpcddp.login.clean_env import clean_environment
from hpcddp.login.judge import ask, judge
from hpcddp.login.on_disk import read_on_disk
from hpcddp.login.planning import on_path
from hpcddp.record import Record
from hpcddp.runs.choice import Origin, choose_run, is_run
from hpcddp.runs.folder import RunFolder, list_holders, show_path
from hpcddp.runs.jsonfile import write_object
from hpcddp.runs.lock import name_end
from hpcddp.runs.submitted import (
    Submission,
    begin_submission,
    drop_submission,
    has_submissions,
    is_begun_beside,
    note_submission,
    script_of,
)
from hpcddp.runs.sweep_folder import note_sweep
from hpcddp.schedulers.commands import find_id
from hpcddp.schedulers.job_id import parse_id
from hpcddp.schedulers.registry import find_scheduler
from hpcddp.schedulers.row import Scheduler
from hpcddp.schedulers.run import run_program
from hpcddp.script.plan import JobPlan
from hpcddp.script.record import plan_record
from hpcddp.script.render import render_script


class Part(Record):
    """One job of what was asked. `array_index`: of an `array` on this machine, where nothing else tells it.
    `place`: the folder of its run, or of the array's. `waited`: the jobs that it waits for."""

    plan: JobPlan
    script: str
    place: RunFolder
    is_new: bool
    why: str
    array_index: str = ""
    array: str = ""
    waited: Sequence[str] = ()


class Queued(Record):
    """One job that was queued. `run`: its run, or the folder of its array or sweep."""

    submission: Submission
    run: RunFolder


def plan_part(
    plan: JobPlan, env: Mapping[str, str], index: str = "", array: str = "", waited: Sequence[str] = ()
) -> Part:
    """The run that the plan's job gets, and its script; `index`: of an `array` that no scheduler makes. `waited`: the
    jobs that it waits for on this machine. Writes nothing.

    RequestError if another job of the run has not ended and this one does not wait for it.
    """
    waited = (*waited, *(job for word in plan.spec.dependency or () for job in word.split(":")[1:]))
    base = os.path.join(os.getcwd(), plan.spec.workdir or "", plan.run_dir)
    if plan.options.array or index:
        run = RunFolder(base)
        if is_run(run) and not os.path.exists(run.sweep):
            raise RequestError(
                f"{plan.run_dir} is a run already, and an array has one for each index beside its own folder",
                f"--name {plan.name}-array",
            )
        check_free(run, plan, waited, env)
        new = not is_run(run)
        return Part(plan, render_script(plan), run, new, "", index, plan.options.array or array, waited)
    choice = choose_run(plan.asked_run._replace(base=base), Origin())
    check_free(choice.run, plan, waited, env)
    if choice.is_new:
        plan = plan._replace(made_run=os.path.basename(choice.run.path))
    elif plan.spec.resume is None:
        plan = plan._replace(resumed_run=os.path.basename(choice.run.path))
    return Part(plan, render_script(plan), choice.run, choice.is_new, str(choice), waited=waited)


def submit_part(
    part: Part, env: Mapping[str, str], number: int = 1, before: Sequence[Submission] = (), created_in: str = ""
) -> Queued:
    """Make the run's folder, queue the job, and note its id. `before`: on this machine, the jobs that it waits for.

    SchedulerError with the scheduler's words if it refuses the job: then nothing is left of it.
    """
    run, plan = part.place, part.plan
    _check_commands(plan, env)
    folder, made = "", _list_missing(run.path)
    try:
        _make_folder(part)
        folder = begin_submission(run, part.script)
        if not part.array_index:  # the jobs before it are of the same request
            _check_alone(part, folder, env)
        submission = _describe(part, created_in or os.getcwd())
        row = find_scheduler(plan.site.scheduler)
        clean = clean_environment(env)
        with _later_interrupts() as interrupts:
            if row.this_machine:
                submission = submission._replace(job=name_job(number), output=output_of(folder))
                submission = start_job(submission, folder, clean, part.array_index, before)
            else:
                submission = submission._replace(job=_hand_in(row, plan, script_of(folder), clean, submission.folder))
            try:
                note_submission(folder, submission)
                _renew_sweep(part)
                if interrupts:
                    raise KeyboardInterrupt
            except (OSError, KeyboardInterrupt):
                _take_back(submission, clean)
                raise
    except OSError as error:
        _clean_up(part, folder, made)
        where = error.filename or run.path
        raise RequestError(
            f"{where} cannot be written: {(error.strerror or str(error)).lower()}",
            "choose a folder that every node can write: --set run_dir=DIR",
        ) from error
    except NoAnswerError as error:  # what was made for the job stays, since it may be queued
        raise NoAnswerError(
            f"{error.message}: job {plan.name} may be queued all the same", "look for it in the queue"
        ) from error
    except (HpcddpError, KeyboardInterrupt):
        _clean_up(part, folder, made)
        raise
    return Queued(submission, run)


def _check_commands(plan: JobPlan, env: Mapping[str, str]) -> None:
    """SchedulerError where the command that takes the job is not here: this machine is not one of the site's."""
    words, site = find_scheduler(plan.site.scheduler).commands.hand_in, plan.site
    if words and on_path(words[0], env) is None:
        raise SchedulerError(
            f"this job is for a login node of {site.name}: here {words[0]} is not on PATH",
            f"submit it there; or print its script: hpcddp render --site {site.name} …; or hpcddp launch --here",
        )


def _list_missing(path: str) -> list[str]:
    """The folders above it that are to be made, the lowest first."""
    missing, above = [], os.path.dirname(path)
    while above and not os.path.isdir(above):
        missing.append(above)
        above = os.path.dirname(above)
    return missing


@contextmanager
def _later_interrupts() -> Iterator[list[int]]:
    """Ctrl-C, or a terminal that is closed, waits for the end of the block: between the hand-in and the note, it would
    leave a job that no run knows. The list has the ones that came."""
    came: list[int] = []
    before = {}
    try:
        for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(one) != signal.SIG_IGN:
                before[one] = signal.signal(one, lambda number, _frame: came.append(number))
    except ValueError:  # Python tells only its main thread of them
        yield came
        return
    try:
        yield came
    finally:
        for one, handler in before.items():
            signal.signal(one, signal.SIG_DFL if handler is None else handler)


def _take_back(submission: Submission, env: Mapping[str, str]) -> None:
    """End a job that could not be noted. SchedulerError if it is still in the queue."""
    row = find_scheduler(submission.scheduler)
    if row.this_machine:
        end_job(submission, kill=True)
        return
    words = [*row.commands.cancel, submission.job]
    answer = run_program(words, env, apart=True)
    if answer.status:
        raise SchedulerError(
            f"job {submission.job} is queued, and not noted in its run: {(answer.stderr or answer.stdout).strip()}",
            shlex.join(words),
        )


def _hand_in(row: Scheduler, plan: JobPlan, script: str, env: Mapping[str, str], folder: str) -> str:
    """The id of the job. SchedulerError if there is none."""
    options = plan.submit_options
    words = [w for word in row.commands.hand_in for w in (options if word == "{options}" else [word])]
    words = [script if word == "{script}" else word for word in words]
    if not words:
        raise SchedulerError(f"hpcddp submits no jobs to {row.title}", "hpcddp render … | its own command")
    answer = run_program(words, env, folder=folder, apart=True)
    job = find_id(row.commands.submitted, answer)
    if job is not None:
        return job
    if answer.status == 0:
        said = " ".join(answer.stdout.split())
        raise NoAnswerError(f"{words[0]} answered {said[-200:]!r}, which has no job id", "")
    why = [line.strip() for line in answer.stderr.splitlines() if line.strip() and "usage" not in line.lower()]
    told = "; ".join(why[:3])[:400] or "it gives no reason"
    if re.search(r"timed out", told, re.IGNORECASE):
        raise NoAnswerError(f"{words[0]} has had no answer from its server: {told}", "")
    if row.commands.down and re.search(row.commands.down, told):
        raise SchedulerError(f"{row.title} does not answer: {told}", "try again later; nothing was queued")
    raise SchedulerError(
        f"{words[0]} refuses the job (status {answer.status}): {told}",
        f"change the request; hpcddp sites show {plan.site.name} has the limits",
    )


def check_free(run: RunFolder, plan: JobPlan, waited: Sequence[str], env: Mapping[str, str]) -> None:
    """RequestError if a job that has not ended writes this run, or will, and the new one does not wait for it: two jobs
    cannot write one run, and the second would cost node-hours first. Of an array's folder: its runs. `waited`: the jobs
    that the new one waits for. SchedulerError if nobody says whether one has ended."""
    one = read_on_disk(run)
    own = f"runs of its own: --name {plan.name}-2" if os.path.exists(run.sweep) else "a run of its own: --fresh"
    # jobs of another scheduler are not asked about: it need not be one of this machine
    one = one._replace(jobs=tuple(job for job in one.jobs if job.is_here or job.scheduler == plan.site.scheduler))
    ends_first = [parse_id(job) for job in waited]
    one = one._replace(jobs=tuple(job for job in one.jobs if not any(first.covers(job.id) for first in ends_first)))
    if any(not job.is_here for job in one.jobs):
        _check_commands(plan, env)
    answers = ask([one], env)
    for job, found in judge(one, answers).live:
        if found.state != "unknown":
            waits = f"--after afterany:{job.id} to resume it then" if job.scheduler else "wait for its end"
            raise RequestError(
                f"job {job.id} ({found.state}) has {show_path(run.path)}, and two jobs cannot write one run",
                f"{waits}; or {own}",
            )
    for job in one.jobs:
        if any(found.state == "unknown" for found in answers.of(job)):
            if job.scheduler in answers.problems:
                problem = answers.problems[job.scheduler]
                raise SchedulerError(
                    f"{problem}: whether job {job.id} of {run.path} has ended is not known",
                    f"try again later; or {own}",
                )
            where = job.holder.host if job.holder is not None else ""
            raise RequestError(
                f"job {job.id} has {show_path(run.path)}, on {where}: whether it has ended can be seen only there",
                f"submit there, or if it has ended: touch {name_end(run)}; or {own}",
            )


def _check_alone(part: Part, folder: str, env: Mapping[str, str]) -> None:
    """RequestError if somebody else has submitted a job for this run since it was planned, or is about to."""
    if is_begun_beside(folder):
        raise RequestError(
            f"another submit for {part.plan.run_dir} is under way", "again in two minutes; or a run of its own: --fresh"
        )
    check_free(part.place, part.plan, part.waited, env)


def _make_folder(part: Part) -> None:
    """The run's folder with the plan, if it is a new one."""
    run, plan = part.place, part.plan
    if not part.is_new:
        return
    os.makedirs(run.path, exist_ok=True)
    write_object(run.about, {})
    write_object(run.plan, plan_record(plan))
    if part.array:
        note_sweep(run, plan.spec.sweep or {}, part.array)


def _renew_sweep(part: Part) -> None:
    """The folder of an array that was there already has the plan and the indices of its newest job."""
    if part.array and not part.is_new:
        _make_folder(part._replace(is_new=True))


def _clean_up(part: Part, folder: str, made: Sequence[str]) -> None:
    """Nothing was queued: what was made for it goes, and nothing else that lies in the folder. `made`: the folders
    around it."""
    run = part.place
    if folder:
        drop_submission(folder)
    if part.is_new and not list_holders(run) and not has_submissions(run):
        for path in (run.about, run.plan, run.sweep):
            with suppress(OSError):
                os.unlink(path)
        for path in (run.submitted, run.path, *made):
            with suppress(OSError):  # it is not empty
                os.rmdir(path)


def _describe(part: Part, folder: str) -> Submission:
    plan = part.plan
    return Submission(
        scheduler=plan.site.scheduler,
        job="",
        since=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        host=os.uname().nodename,
        folder=folder,
        array=plan.options.array,
        walltime_s=plan.walltime_s,
        name=plan.name,
        supervised=plan.supervised,
    )
