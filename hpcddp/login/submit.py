"""Submits a plan: writes script and plan to its run's folder, queues the job, and reports its id."""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from hpcddp.errors import HpcddpError, NoAnswerError, RequestError, SchedulerError
from hpcddp.login.background import name_job, output_of, start_job
from hpcddp.login.find_run import call_run, find_newest_jobs, find_run, list_all_runs
from hpcddp.login.judge import ask_schedulers, judge
from hpcddp.login.on_disk import read_on_disk
from hpcddp.login.planning import find_python_file, on_path, request_of
from hpcddp.ranks.frameworks import FRAMEWORK_VARIABLES
from hpcddp.ranks.launchers import LAUNCHERS
from hpcddp.record import Record
from hpcddp.runs.folder import RunFolder, cannot_write, list_holders, show_path
from hpcddp.runs.lock import name_end
from hpcddp.runs.settings import RUN_GROUP, read_recorded
from hpcddp.runs.start import FINISHED, RESUMES, Outlook, RunRequest, begin_run, foresee, is_run, set_run_aside
from hpcddp.runs.state import write_plan_file
from hpcddp.runs.submitted import (
    Submission,
    begin_submission,
    drop_submission,
    has_submissions,
    list_sweep_runs,
    note_submission,
    note_sweep,
    read_submissions,
    script_of,
)
from hpcddp.runs.verified import is_verified, note_verified
from hpcddp.schedulers.job_id import list_indices, parse_id
from hpcddp.schedulers.registry import all_schedulers, find_current_job, find_scheduler
from hpcddp.schedulers.row import Scheduler
from hpcddp.schedulers.run import queue_job
from hpcddp.script.file_check import check_output, check_plan
from hpcddp.script.jobplan import make_plan_file
from hpcddp.script.plan import SETTABLE, JobPlan, PlannedBy, plan_job
from hpcddp.script.render import render_script
from hpcddp.script.site import Site
from hpcddp.script.spec import JobSpec
from hpcddp.script.sweeping import check_sweep, is_one_array, name_run, split_points
from hpcddp.sweep import count_points

# The environment that a new job may see of the one that submits it: none of that job's own variables.


# hpcddp's own that a person sets; all others are those of a job or of a rank.
_SETTINGS = ("HPCDDP_SITE", "HPCDDP_INTERFACE", *SETTABLE)
# What schedulers and job scripts set beside the variables with their names in them.
_OF_JOBS = (
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "GPU_DEVICE_ORDINAL"),
    *("OMP_NUM_THREADS", "NCPUS", "ENVIRONMENT", "TMPDIR", "JOB_NAME", "JOB_SCRIPT", "QUEUE", "RESTARTED", "NQUEUES"),
)


def clean_environment(env: Mapping[str, str]) -> dict[str, str]:
    """`env` itself outside of a job; in one, what is left without that job."""
    if find_current_job(env) is None and "HPCDDP_ATTEMPT" not in env:
        return dict(env)
    schedulers = all_schedulers()
    settings = {*_SETTINGS, *(name for row in schedulers for name in row.variables.settings)}
    prefixes = (
        "HPCDDP_",
        *(prefix for row in schedulers for prefix in row.variables.prefixes),
        *(prefix for row in LAUNCHERS.values() for prefix in row.prefixes),
    )
    gone = {name for name in env if name.startswith(prefixes) and name not in settings}
    gone.update(FRAMEWORK_VARIABLES, *(row.all_reads for row in LAUNCHERS.values()))
    return {name: value for name, value in env.items() if name not in gone and name not in _OF_JOBS}


class Part(Record):
    """One job of a request, and what its start would do now. `request`: for its run, or for the runs of its array
    without their indices. `array_index`: of a job on this machine that is one index, which nothing else tells it.
    `outlooks`: by index, of the runs that are there; "" of a job that is no array. `is_done`: whether nothing is left
    to do."""

    plan: JobPlan
    script: str
    request: RunRequest
    outlooks: Mapping[str, Outlook]
    is_done: bool
    array_index: str = ""

    @property
    def run(self) -> RunFolder:
        """The job's run, or the folder of its array."""
        return RunFolder(self.request.folder)

    def __str__(self) -> str:
        if not self.plan.options.array:
            return str(self.outlooks[""])
        kinds = [one.kind for one in self.outlooks.values()]
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        return f"array {show_path(self.run.path)}: {counts or 'new'}"


def plan_part(plan: JobPlan, env: Mapping[str, str], index: str = "", waited: Sequence[str] = ()) -> Part:
    """Find what a start of the plan's job would do now, and its script; `index`: of an array that no scheduler makes.
    `waited`: the jobs that it waits for on this machine. Writes nothing.

    RequestError if another job of the run has not ended and this one does not wait for it, and if the folder is
    another kind of thing.
    """
    waited = (*waited, *(job for word in plan.spec.dependency or () for job in word.split(":")[1:]))
    whole = request_of(plan)
    array = RunFolder(whole.folder)
    is_sweep = os.path.exists(array.sweep)
    if (plan.options.array or index) and is_run(array) and not is_sweep:
        raise RequestError(
            f"{plan.run_dir} is a run already, and an array has one for each index beside its own folder",
            f"--name {plan.name}-array",
        )
    if is_sweep and not (plan.options.array or index):
        raise RequestError(f"{plan.run_dir} is a sweep or an array, and no run", f"--name {plan.name}-run")
    request = whole.of_index(index)
    _check_free(request, plan, waited, env)
    indices = list_indices(plan.options.array)
    there = [one.array_index for one in list_sweep_runs(array)] if indices else [""]
    # what holds a run was asked about before
    outlooks = {one: foresee(request.of_index(one), lambda _scheduler, _job: "gone") for one in there}
    done = [one for one in outlooks.values() if one.kind == FINISHED and read_on_disk(one.run).is_done]
    is_done = len(done) == (len(indices) or 1) and not request.takes_words
    return Part(plan, render_script(plan), request, outlooks, is_done, index)


def submit_part(part: Part, env: Mapping[str, str], number: int = 1, before: Sequence[Submission] = ()) -> Submission:
    """Make the run's folder, queue the job, and note its id. `before`: on this machine, the jobs that it waits for.

    SchedulerError with the scheduler's words if it refuses the job: then nothing is left of it.
    """
    plan, row = part.plan, find_scheduler(part.plan.site.scheduler)
    _check_commands(plan, env)
    submission = Submission(
        scheduler=row.name,
        job="",
        since=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        host=os.uname().nodename,
        folder=os.getcwd(),
        array=plan.options.array,
        walltime_s=plan.walltime_s,
        name=plan.job_name,
        supervised=plan.supervised,
    )
    clean = clean_environment(env)
    try:
        with _make_folder(part, env) as folder:
            if row.this_machine:
                submission = submission._replace(job=name_job(number), output=output_of(folder))
                submission = start_job(submission, folder, clean, part.array_index, before)
            else:
                job = _hand_in(row, plan, script_of(folder), clean, submission.folder)
                output = plan.name_output(job, submission.folder, clean.get("HOME", ""))
                submission = submission._replace(job=job, output=output)
            try:
                note_submission(folder, submission)
                if plan.options.array:
                    _note_array(part)
            except OSError as error:
                raise NoAnswerError(f"{submission.job}: {cannot_write(part.run, error).message}", "") from error
    except OSError as error:
        raise _cannot_write(part.run, error) from error
    except NoAnswerError as error:
        raise NoAnswerError(
            f"{error.message}: job {plan.job_name} may be queued all the same", "look for it in the queue"
        ) from error
    return submission


def _check_commands(plan: JobPlan, env: Mapping[str, str]) -> None:
    """SchedulerError where the command that takes the job is not here: this machine is not one of the site's."""
    words, site = find_scheduler(plan.site.scheduler).commands.hand_in, plan.site
    if words and on_path(words[0], env) is None:
        raise SchedulerError(
            f"this job is for a login node of {site.name}: here {words[0]} is not on PATH",
            f"submit it there; or print its script: hpcddp render --site {site.name} …; or hpcddp launch --here",
        )


@contextmanager
def _make_folder(part: Part, env: Mapping[str, str]) -> Iterator[str]:
    """The submission's folder, and that of a new run around it; --fresh sets an old one aside. Where the body fails,
    nothing of it is left, and nothing else that lies there is touched; but all of it where the job may be queued, as
    after an interrupt.

    OSError; HeldError if an attempt has taken the run by now.
    """
    run, is_array, is_new = part.run, part.plan.options.array != "", not is_run(part.run)
    parents = [os.path.dirname(run.path)]
    while not os.path.isdir(parents[-1]):
        parents.append(os.path.dirname(parents[-1]))
    folder, old = "", None
    try:
        folder = begin_submission(run, part.script)
        if not (is_array or is_new) and (old := set_run_aside(part.request, env)) is not None:
            drop_submission(os.path.join(old.submitted, os.path.basename(folder)))
            is_new = True
            folder = begin_submission(run, part.script)
        if is_new and is_array:
            _note_array(part)
        elif is_new:
            begin_run(run, part.request)
            write_plan_file(run, make_plan_file(part.plan))
        yield folder
    except NoAnswerError:
        raise
    except (HpcddpError, OSError):
        if folder:
            drop_submission(folder)
        if is_new and not (list_holders(run) or has_submissions(run)):
            for path in (run.about, run.plan, run.sweep):
                with suppress(OSError):
                    os.unlink(path)
            for path in (run.submitted, run.path, *parents[:-1]):
                with suppress(OSError):  # it is not empty
                    os.rmdir(path)
            if old is not None:
                with suppress(OSError):
                    os.rename(old.path, run.path)
        raise


def _note_array(part: Part) -> None:
    """An array's folder has the plan and the indices of its newest job. OSError."""
    write_plan_file(part.run, make_plan_file(part.plan))
    note_sweep(part.run, part.plan.spec.sweep or {}, part.plan.options.array)


def _hand_in(row: Scheduler, plan: JobPlan, script: str, env: Mapping[str, str], folder: str) -> str:
    """The id of the job. SchedulerError if there is none."""
    options = plan.submit_options
    words = [w for word in row.commands.hand_in for w in (options if word == "{options}" else [word])]
    words = [script if word == "{script}" else word for word in words]
    if not words:
        raise SchedulerError(f"hpcddp submits no jobs to {row.title}", "hpcddp render … | its own command")
    known = f"hpcddp sites show {plan.site.name}" if plan.site.queues else row.commands.list_queues
    hint = f"change the request; {known or 'the guide of the cluster'} has the limits"
    return queue_job(row.name, words, env, folder, hint, apart=True)


def _check_free(request: RunRequest, plan: JobPlan, waited: Sequence[str], env: Mapping[str, str]) -> None:
    """RequestError if a job that has not ended writes the run, or will, and the new one does not wait for it: two jobs
    cannot write one run, and the second would cost node-hours first. Of an array's folder: its runs. `waited`: the jobs
    that the new one waits for. SchedulerError if nobody says whether one has ended."""
    run = RunFolder(request.folder)
    one = read_on_disk(run)
    # jobs of another scheduler are not asked about: it need not be one of this machine
    jobs = [job for job in one.jobs if job.is_here or job.scheduler == plan.site.scheduler]
    first = [parse_id(job) for job in waited if not request.fresh]  # what runs is not set aside
    one = one._replace(jobs=tuple(job for job in jobs if not any(before.matches(job.id) for before in first)))
    if any(not job.is_here for job in one.jobs):
        _check_commands(plan, env)
    answers = ask_schedulers([one], env)
    own = "another run: --name X"
    for job, found in judge(one, answers).live:
        if found.state != "unknown":
            resumes = f"--after afterany:{job.id} to resume it then" if job.scheduler else "wait for its end"
            first_it_ends = f"hpcddp cancel {call_run(run)}, which ends it" if request.fresh else resumes
            raise RequestError(
                f"job {job.id} ({found.state}) has {show_path(run.path)}, and two jobs cannot write one run",
                f"{first_it_ends}; or {own}",
            )
        if job.scheduler in answers.problems:
            problem = answers.problems[job.scheduler]
            raise SchedulerError(
                f"{problem}: whether job {job.id} of {run.path} has ended is not known", f"try again later; or {own}"
            )
        where = job.holder.host if job.holder is not None else ""
        raise RequestError(
            f"job {job.id} has {show_path(run.path)}, on {where}: whether it has ended can be seen only there",
            f"submit there, or if it has ended: touch {name_end(run)}; or {own}",
        )


# One request is one job, or several: a sweep over keys of the job file has one for each point, and so has an array
# where the scheduler takes none.


class Parts(Record):
    """All jobs of one request that have anything to do. `sweep`: the folder of a sweep or array that is several jobs;
    its runs lie beside it. `before`: on this machine, the jobs that the first one waits for."""

    parts: tuple[Part, ...]
    remarks: tuple[str, ...]
    sweep: RunFolder | None = None
    spec: JobSpec = JobSpec()
    before: tuple[Submission, ...] = ()


def plan_parts(spec: JobSpec, site: Site, env: Mapping[str, str], by: PlannedBy) -> Parts:
    """Plan every job of the request; of several, one that has nothing to do is left out. Writes nothing.

    RequestError if nothing is left to do for any of them; what `plan_job` and `plan_part` raise.
    """
    spec, before = _resolve_after(spec, find_scheduler(site.scheduler))
    split, sweep = _split(spec, site)
    remarks: dict[str, None] = {}
    parts = []
    for one, index in split:
        plan = plan_job(one, site, by)
        remarks.update(dict.fromkeys(plan.remarks))
        parts.append(plan_part(plan, env, index, [one.job for one in before]))
        if index:
            sweep = RunFolder(request_of(plan).folder)
    left = [part for part in parts if not part.is_done]
    if not left:
        raise _nothing_left(parts[0], sweep)
    remarks.update(dict.fromkeys(str(part) for part in parts if part.is_done))
    return Parts(tuple(left), tuple(remarks), sweep, spec, tuple(before))


def _nothing_left(part: Part, sweep: RunFolder | None) -> RequestError:
    """The error for a job that would cost node-hours and make no step."""
    runs = sweep or (part.run if part.plan.options.array else None)
    other = "to begin anew: --fresh; or another run: --name X"
    if runs is not None:
        return RequestError(f"each run of {show_path(runs.path)} is finished: a job would make no step", other)
    more = f"for a larger number of epochs: --resume {call_run(part.run)}"
    return RequestError(f"{str(part).partition(';')[0]}: a job would make no step", f"{more}; {other}")


def check_parts(parts: Parts, env: Mapping[str, str]) -> list[str]:
    """Remarks on paths, each once. RequestError for what clearly is not there."""
    told: dict[str, None] = {}
    for part in parts.parts:
        told.update(dict.fromkeys(check_plan(part.plan, env.get("PATH", ""))))
        told.update(dict.fromkeys(check_output(part.plan.site.scheduler, part.script)))
        told.update(dict.fromkeys(_find_other_words(part)))
    return list(told)


def _find_other_words(part: Part) -> Iterator[str]:
    """A line where the run was begun with another command, which its start refuses. Not of an array, whose points
    have words of their own."""
    outlook = part.outlooks.get("")
    recorded = read_recorded(outlook.run) if outlook is not None and outlook.kind == RESUMES else None
    words = recorded.settings.get(RUN_GROUP, {}).get("command") if recorded is not None else None
    takes = part.request.takes_words or "command" in (part.plan.spec.accept or ())
    if words and "…" not in words and words != [*part.request.command] and not takes:
        name = call_run(part.run)
        yield f"run {name} was begun with {shlex.join(words)}; to take these words: --resume {name}"


def list_unverified(parts: Parts, env: Mapping[str, str]) -> list[str]:
    """A line for each training script that `hpcddp verify` has not run, the first time that it is submitted."""
    told: dict[str, None] = {}
    for part in parts.parts:
        folder, command = part.plan.spec.workdir or "", part.plan.command
        name = find_python_file(command, folder)
        script = os.path.join(folder, name)
        if not name or is_verified(script, env):
            continue
        with suppress(OSError), open(script, "rb") as file:
            if b"hpcddp.runtime(" in file.read(2**20):
                note_verified(script, env)
                told[f"{name} was never verified: hpcddp verify -- {shlex.join(command)}"] = None
    return list(told)


def submit_parts(parts: Parts, env: Mapping[str, str]) -> list[Submission]:
    """Queue them all; on this machine one after another. What was queued stays queued if a later one is refused: the
    error says how many were."""
    queued: list[Submission] = []
    before = list(parts.before)
    for number, part in enumerate(parts.parts, 1):
        try:
            queued.append(submit_part(part, env, number, before))
            if parts.sweep is not None and number == 1:
                axes = parts.spec.sweep or {}
                note_sweep(parts.sweep, axes, parts.spec.array or f"1-{count_points(axes)}")
        except OSError as error:
            raise _cannot_write(parts.sweep or part.run, error) from error
        except HpcddpError as error:
            if not queued:
                raise
            left = f"{len(queued)} of {len(parts.parts)} jobs are queued, {queued[0].job} to {queued[-1].job}"
            raise type(error)(f"{error.message}; {left}", error.hint) from error
        if find_scheduler(part.plan.site.scheduler).this_machine:
            before.append(queued[-1])
    return queued


def _cannot_write(run: RunFolder, error: OSError) -> RequestError:
    found = cannot_write(run, error)
    return RequestError(found.message, found.hint)


def _split(spec: JobSpec, site: Site) -> tuple[list[tuple[JobSpec, str]], RunFolder | None]:
    """Each job's spec, with its index where the script does not learn it from a scheduler; and the sweep's folder."""
    row = find_scheduler(site.scheduler)
    option = row.directives.options.get("array")
    takes_arrays = option is not None and option not in site.rejects
    if spec.sweep is not None and count_points(spec.sweep) > 1 and not (takes_arrays and is_one_array(spec)):
        check_sweep(spec)
        if row.this_machine and is_one_array(spec):  # one after another, which is within any limit
            spec = spec._replace(array_limit=None)
        if spec.array_limit:
            raise RequestError("array_limit beside a sweep that is no array", "leave out array_limit")
        name = name_run(spec)
        run_dir = (spec.run_dir or f"runs/{name}").rstrip("/")
        folder = RunFolder(os.path.join(os.getcwd(), spec.workdir or "", run_dir))
        if os.path.isdir(folder.path) and not os.path.exists(folder.sweep):
            raise RequestError(f"{run_dir} is there already, and is no sweep", f"--name {name}-sweep")
        return [(one, "") for one in split_points(spec._replace(name=name), run_dir)], folder
    if row.this_machine and spec.array is not None:
        return [(spec._replace(array=None, array_limit=None), index) for index in _indices(spec.array)], None
    return [(spec, "")], None


def _indices(array: str) -> list[str]:
    indices = sorted(list_indices(array)) if re.fullmatch(r"\d+-\d+(:\d+)?", array, re.ASCII) else []
    if not indices:
        raise RequestError(f"array {array!r} is not FIRST-LAST or FIRST-LAST:STEP", "--array 1-9")
    return [str(index) for index in indices]


def _resolve_after(spec: JobSpec, row: Scheduler) -> tuple[JobSpec, list[Submission]]:
    """`--after 12` and `--after train` as the dependencies that directives take: afterok:12, where there is such; and
    on this machine the jobs that are waited for, which no directive takes."""
    words = spec.dependency or ()
    if spec.sources.get("dependency", "").startswith("--after"):
        kinds = ("afterany",) if row.this_machine else row.directives.dependencies
        words = tuple(_name_jobs(word, "afterok" if "afterok" in kinds else kinds[0]) for word in words)
        spec = spec._replace(dependency=words)
    if not row.this_machine:
        return spec, []
    known = [one for run in (list_all_runs() if words else ()) for one in read_submissions(run)]
    found = []
    for word in words:
        kind, *jobs = word.split(":")
        if kind not in {"afterany", "after"}:
            hint = "--after afterany:JOB"
            raise RequestError(f"--after {word}: on this machine a job waits for the end of others", hint)
        for job in jobs:
            its = [one for one in known if parse_id(one.job).is_same(parse_id(job))]
            if not its:
                raise RequestError(f"there is no job {job} below runs/", "hpcddp status")
            found.append(its[0])
    return spec._replace(dependency=None), found


def _name_jobs(word: str, usual_kind: str) -> str:
    """`train`, `12`, `afterany:train` with the ids of the jobs."""
    kind, _, job = word.rpartition(":")
    ids = [job] if parse_id(job).is_job else find_newest_jobs(find_run(job))
    if not ids:
        raise RequestError(f"--after {job}: no job of that run is known", "--after JOBID")
    return ":".join((kind or usual_kind, *ids))
