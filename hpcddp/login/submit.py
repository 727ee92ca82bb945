"""Submits a plan: writes script and plan to its run's folder, queues the job, and reports its id."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from hpcddp.errors import HpcddpError, NoAnswerError, RequestError, SchedulerError
from hpcddp.login.background import name_job, start_job
from hpcddp.login.find_run import find_newest_jobs, find_run, format_run
from hpcddp.login.judge import ask_schedulers, judge
from hpcddp.login.on_disk import read_on_disk
from hpcddp.login.planning import find_python_file, on_path, request_of
from hpcddp.ranks.frameworks import FRAMEWORK_VARIABLES
from hpcddp.ranks.launchers import LAUNCHERS
from hpcddp.record import Record
from hpcddp.runs.folder import RunFolder, cannot_write, list_numbered, show_path
from hpcddp.runs.jsonfile import format_now
from hpcddp.runs.lock import name_end
from hpcddp.runs.settings import RUN_GROUP, read_recorded
from hpcddp.runs.start import FINISHED, RESUMES, Outlook, RunRequest, begin_run, inspect_run, is_run, set_run_aside
from hpcddp.runs.state import write_plan_file
from hpcddp.runs.submitted import (
    Submission,
    begin_submission,
    drop_submission,
    list_sweep_runs,
    record_submission,
    record_sweep,
    script_of,
)
from hpcddp.runs.verified import is_verified, record_verified
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

# Variables of hpcddp's that a person sets; all others are those of a job or of a rank.
_SETTINGS = ("HPCDDP_SITE", "HPCDDP_INTERFACE", *SETTABLE)
# What schedulers and job scripts set beside the variables with their names in them.
_OF_JOBS = (
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "GPU_DEVICE_ORDINAL"),
    *("OMP_NUM_THREADS", "NCPUS", "ENVIRONMENT", "TMPDIR", "JOB_NAME", "JOB_SCRIPT", "QUEUE", "RESTARTED", "NQUEUES"),
)


def clean_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The environment that a new job may see: `env` itself outside of a job; in one, without that job's variables."""
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
    """One job of a request. `request`: for its run, or for an array's runs without their indices. `outlook`: what its
    start would do now; None for an array. `is_done`: nothing is left to do."""

    plan: JobPlan
    script: str
    request: RunRequest
    outlook: Outlook | None
    is_done: bool

    @property
    def run(self) -> RunFolder:
        return RunFolder(self.request.folder)

    def __str__(self) -> str:
        return f"array {show_path(self.run.path)}" if self.outlook is None else str(self.outlook)


def plan_part(plan: JobPlan, env: Mapping[str, str]) -> Part:
    """Find what a start of the plan's job would do now, and its script. RequestError if another job of the run has not
    ended and this one does not wait for it, and if the folder is another kind of thing."""
    request, array = request_of(plan), plan.options.array
    run = RunFolder(request.folder)
    is_sweep = os.path.exists(run.sweep)
    if array and is_run(run) and not is_sweep:
        raise RequestError(
            f"{plan.run_dir} is a run already, and an array has one for each index beside its own folder",
            f"--name {plan.name}-array",
        )
    if is_sweep and not array:
        raise RequestError(f"{plan.run_dir} is a sweep or an array, and no run", f"--name {plan.name}-run")
    _check_free(request, plan, env)
    runs = [request.of_index(one.array_index) for one in list_sweep_runs(run)] if array else [request]
    starts = [inspect_run(one) for one in runs]
    ended = [read_on_disk(one.run) for one in starts if one.kind == FINISHED]
    done = [one for one in ended if one.is_finished and not any(one.end)]
    is_done = len(done) == (len(list_indices(array)) or 1) and not request.takes_words
    return Part(plan, render_script(plan), request, None if array else starts[0], is_done)


def submit_part(part: Part, env: Mapping[str, str], number: int = 1, before: Sequence[Submission] = ()) -> Submission:
    """Make the run's folder, queue the job, and record its id. `before`: on this machine, the jobs that it waits for.
    SchedulerError if it is refused: then nothing is left of it."""
    plan, row = part.plan, find_scheduler(part.plan.site.scheduler)
    _check_commands(plan, env)
    submission = Submission(
        scheduler=row.name,
        job="",
        since=format_now(),
        host=os.uname().nodename,
        folder=os.getcwd(),
        array=plan.options.array,
        walltime_s=plan.walltime_s,
        supervised=plan.supervised,
    )
    clean = clean_environment(env)
    try:
        with _make_folder(part, env) as folder:
            if row.this_machine:
                submission = submission._replace(job=name_job(number), output=os.path.join(folder, "output"))
                submission = start_job(submission, folder, clean, before)
            else:
                job = _hand_in(row, plan, script_of(folder), clean, submission.folder)
                output = plan.name_output(job, submission.folder, clean.get("HOME", ""))
                submission = submission._replace(job=job, output=output)
            try:
                record_submission(folder, submission)
                if plan.options.array:
                    _record_array(part)
            except OSError as error:
                raise NoAnswerError(f"{submission.job}: {cannot_write(part.run, error).message}", "") from error
    except OSError as error:
        raise cannot_write(part.run, error) from error
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
    nothing of it is left, unless the job may be queued. OSError; HeldError."""
    run, is_array, is_new = part.run, part.plan.options.array != "", not is_run(part.run)
    folder, old, parent = "", None, os.path.dirname(run.path)
    made = [run.submitted, run.path] + ([] if os.path.isdir(parent) else [parent])
    try:
        folder = begin_submission(run, part.script)
        if not (is_array or is_new) and (old := set_run_aside(part.request, env)) is not None:
            drop_submission(os.path.join(old.submitted, os.path.basename(folder)))
            is_new = True
            folder = begin_submission(run, part.script)
        if is_new and is_array:
            _record_array(part)
        elif is_new:
            begin_run(run, part.request)
            write_plan_file(run, make_plan_file(part.plan))
        yield folder
    except NoAnswerError:
        raise
    except (HpcddpError, OSError):
        if folder:
            drop_submission(folder)
        if is_new and not (list_numbered(run.holders) or list_numbered(run.submitted)):
            for path in (run.about, run.plan, run.sweep):
                with suppress(OSError):
                    os.unlink(path)
            for path in made:
                with suppress(OSError):  # it is not empty
                    os.rmdir(path)
            if old is not None:
                with suppress(OSError):
                    os.rename(old.path, run.path)
        raise


def _record_array(part: Part) -> None:
    write_plan_file(part.run, make_plan_file(part.plan))
    record_sweep(part.run, part.plan.spec.sweep or {}, part.plan.options.array)


def _hand_in(row: Scheduler, plan: JobPlan, script: str, env: Mapping[str, str], folder: str) -> str:
    options = plan.submit_options
    words = [w for word in row.commands.hand_in for w in (options if word == "{options}" else [word])]
    words = [script if word == "{script}" else word for word in words]
    if not words:
        raise SchedulerError(f"hpcddp submits no jobs to {row.title}", "hpcddp render … | its own command")
    known = f"hpcddp sites show {plan.site.name}" if plan.site.queues else row.commands.list_queues
    hint = f"change the request; {known or 'the guide of the cluster'} has the limits"
    return queue_job(row.name, words, env, folder, hint, apart=True)


def _check_free(request: RunRequest, plan: JobPlan, env: Mapping[str, str]) -> None:
    """RequestError if a job that has not ended may write the run, and the new one does not wait for it: it would cost
    node-hours first. SchedulerError if nobody says whether one has ended."""
    run = RunFolder(request.folder)
    one = read_on_disk(run)
    # jobs of another scheduler are not asked about: it need not be one of this machine
    jobs = [job for job in one.jobs if job.is_here or job.scheduler == plan.site.scheduler]
    words = () if request.fresh else plan.spec.dependency or ()  # what runs is not set aside
    first = [parse_id(job) for word in words for job in word.split(":")[1:]]
    one = one._replace(jobs=tuple(job for job in jobs if not any(before.matches(job.id) for before in first)))
    answers = ask_schedulers([one], env)
    other = "another run: --name X"
    for job, found in judge(one, answers).live:
        if found.state != "unknown":
            takes_after = job.scheduler and "dependency" in find_scheduler(plan.site.scheduler).directives.options
            resumes = f"--after afterany:{job.id} to resume it then" if takes_after else "wait for its end"
            first_it_ends = f"hpcddp cancel {format_run(run)}, which ends it" if request.fresh else resumes
            raise RequestError(
                f"job {job.id} ({found.state}) has {show_path(run.path)}, and two jobs cannot write one run",
                f"{first_it_ends}; or {other}",
            )
        problem = answers.problems.get(job.scheduler, found.reason)
        raise SchedulerError(
            f"{problem}: whether job {job.id} of {show_path(run.path)} has ended is not known",
            f"try again later; if it has ended: touch {name_end(run)}; or {other}",
        )


class Parts(Record):
    """The jobs of a request that have anything to do: one, or several of a sweep over keys of the job file, and of an
    array where the scheduler takes none. `sweep`: the folder of a sweep that is several jobs."""

    parts: tuple[Part, ...]
    remarks: tuple[str, ...]
    sweep: RunFolder | None = None
    spec: JobSpec = JobSpec()


def plan_parts(spec: JobSpec, site: Site, env: Mapping[str, str], by: PlannedBy) -> Parts:
    """Plan every job of the request. RequestError if nothing is left to do for any; the errors of `plan_job` and
    `plan_part`."""
    spec = _resolve_after(spec, find_scheduler(site.scheduler))
    specs, sweep = _split(spec, site)
    plans = [plan_job(one, site, by) for one in specs]
    parts = [plan_part(plan, env) for plan in plans]
    remarks = dict.fromkeys(remark for plan in plans for remark in plan.remarks)
    left = [part for part in parts if not part.is_done]
    if not left:
        raise _nothing_left(parts[0], sweep)
    remarks.update(dict.fromkeys(str(part) for part in parts if part.is_done))
    return Parts(tuple(left), tuple(remarks), sweep, spec)


def _nothing_left(part: Part, sweep: RunFolder | None) -> RequestError:
    runs = sweep or (part.run if part.plan.options.array else None)
    other = "to begin anew: --fresh; or another run: --name X"
    if runs is not None:
        return RequestError(f"each run of {show_path(runs.path)} is finished: a job would make no step", other)
    more = f"for a larger number of epochs: --resume {format_run(part.run)}"
    return RequestError(f"{str(part).partition(';')[0]}: a job would make no step", f"{more}; {other}")


def check_parts(parts: Parts, env: Mapping[str, str]) -> list[str]:
    """Remarks on paths, each once. RequestError for what clearly is not there."""
    remarks = list[str]()
    for part in parts.parts:
        remarks += check_plan(part.plan, env.get("PATH", ""))
        remarks += check_output(part.plan.site.scheduler, part.script)
        remarks += _find_other_words(part)
    return list(dict.fromkeys(remarks))


def _find_other_words(part: Part) -> Iterator[str]:
    """A line where the run was begun with another command, which its start refuses."""
    outlook = part.outlook
    recorded = read_recorded(part.run) if outlook is not None and outlook.kind == RESUMES else None
    words = recorded.settings.get(RUN_GROUP, {}).get("command") if recorded is not None else None
    takes = part.request.takes_words or "command" in (part.plan.spec.accept or ())
    if words and "…" not in words and words != [*part.request.command] and not takes:
        name = format_run(part.run)
        yield f"run {name} was begun with {shlex.join(words)}; to take these words: --resume {name}"


def list_unverified(parts: Parts, env: Mapping[str, str]) -> list[str]:
    """A line for each training script that `hpcddp verify` has not run, the first time that it is submitted."""
    remarks: dict[str, None] = {}
    for part in parts.parts:
        folder, command = part.plan.spec.workdir or "", part.plan.command
        name = find_python_file(command, folder)
        script = os.path.join(folder, name)
        if not name or is_verified(script, env):
            continue
        with suppress(OSError), open(script, "rb") as file:
            if b"hpcddp.runtime(" in file.read(2**20):
                record_verified(script, env)
                remarks[f"{name} was never verified: hpcddp verify -- {shlex.join(command)}"] = None
    return list(remarks)


def submit_parts(parts: Parts, env: Mapping[str, str]) -> list[Submission]:
    """Queue them all; on this machine one after another. What was queued stays queued if a later one is refused."""
    queued: list[Submission] = []
    for number, part in enumerate(parts.parts, 1):
        try:
            queued.append(submit_part(part, env, number, queued))
            if parts.sweep is not None and number == 1:
                axes = parts.spec.sweep or {}
                record_sweep(parts.sweep, axes, parts.spec.array or f"1-{count_points(axes)}")
        except OSError as error:
            raise cannot_write(parts.sweep or part.run, error) from error
        except HpcddpError as error:
            if not queued:
                raise
            left = f"{len(queued)} of {len(parts.parts)} jobs are queued, {queued[0].job} to {queued[-1].job}"
            raise type(error)(f"{error.message}; {left}", error.hint) from error
    return queued


def _split(spec: JobSpec, site: Site) -> tuple[list[JobSpec], RunFolder | None]:
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
        return split_points(spec._replace(name=name), run_dir), folder
    return [spec], None


def _resolve_after(spec: JobSpec, row: Scheduler) -> JobSpec:
    """`--after 12` and `--after train` as the dependencies that directives take: afterok:12, where there is such."""
    kinds, words = row.directives.dependencies, spec.dependency or ()
    if not kinds or not spec.sources.get("dependency", "").startswith("--after"):
        return spec
    kind = "afterok" if "afterok" in kinds else kinds[0]
    return spec._replace(dependency=tuple(_name_jobs(word, kind) for word in words))


def _name_jobs(word: str, usual_kind: str) -> str:
    kind, _, job = word.rpartition(":")
    ids = [job] if parse_id(job).is_job else find_newest_jobs(find_run(job))
    if not ids:
        raise RequestError(f"--after {job}: no job of that run is known", "--after JOBID")
    return ":".join((kind or usual_kind, *ids))
