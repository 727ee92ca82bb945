"""One request is one job, or several: a sweep over keys of the job file has one for each point, and so has an array
where the scheduler takes none."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from hpcddp.errors import HpcddpError, RequestError, SchedulerError
from hpcddp.login.find_run import call_run, find_newest_jobs, find_run, list_all_runs
from hpcddp.login.look import look_here
from hpcddp.login.planning import plan_spec
from hpcddp.login.script_check import ReadPrograms, check_training_script
from hpcddp.login.submit import Part, Queued, plan_part, submit_part
from hpcddp.record import Record
from hpcddp.runs.command import name_command
from hpcddp.runs.folder import RunFolder
from hpcddp.runs.submitted import Submission, read_submissions
from hpcddp.runs.sweep_folder import note_sweep
from hpcddp.schedulers.job_id import parse_id
from hpcddp.schedulers.registry import find_scheduler
from hpcddp.script.preflight import check_output, check_plan
from hpcddp.script.site import Site
from hpcddp.script.spec import JobSpec
from hpcddp.script.sweeping import check_sweep, is_one_array, split_points
from hpcddp.sweep import count_points


class Parts(Record):
    """All jobs of one request. `sweep`: the folder of a sweep that is several jobs; its runs lie beside it. `before`:
    on this machine, the jobs that the first one waits for."""

    parts: tuple[Part, ...]
    remarks: tuple[str, ...]
    sweep: RunFolder | None = None
    spec: JobSpec = JobSpec()
    before: tuple[Submission, ...] = ()


def plan_parts(spec: JobSpec, site: Site, env: Mapping[str, str], created_by: str = "") -> Parts:
    """Plan every job of the request. Writes nothing, and raises what `plan_job` and `plan_part` do."""
    row = find_scheduler(site.scheduler)
    spec = _with_kinds(spec, row.directives.dependencies if not row.this_machine else ("afterany",))
    before: list[Submission] = []
    if row.this_machine and spec.dependency:
        before = _find_before(spec.dependency)
        spec = spec._replace(dependency=None)
    split, sweep = _split(spec, site)
    remarks: dict[str, None] = {}
    parts = []
    for one, index in split:
        plan = plan_spec(one, site, created_by)
        remarks.update(dict.fromkeys(plan.remarks))
        parts.append(plan_part(plan, env, index, spec.array or "", [one.job for one in before]))
    return Parts(tuple(parts), tuple(remarks), sweep, spec, tuple(before))


def check_parts(parts: Parts, env: Mapping[str, str]) -> list[str]:
    """Remarks on paths, each once. RequestError for what clearly is not there."""
    here = look_here(env)
    told: dict[str, None] = {}
    read: ReadPrograms = {}
    for part in parts.parts:
        told.update(dict.fromkeys(check_plan(part.plan, here)))
        told.update(dict.fromkeys(check_training_script(part.plan, read)))
        told.update(dict.fromkeys(check_output(part.plan.site.scheduler, part.script, here)))
    return list(told)


def submit_parts(parts: Parts, env: Mapping[str, str]) -> list[Queued]:
    """Queue them all; on this machine one after another. What was queued stays queued if a later one is refused: the
    error says how many were."""
    queued: list[Queued] = []
    before = list(parts.before)
    for number, part in enumerate(parts.parts, 1):
        try:
            done = submit_part(part, env, number, before)
            queued.append(done)
            if parts.sweep is not None and number == 1:
                _note(parts)
        except (HpcddpError, KeyboardInterrupt) as error:
            if not queued:
                raise
            ids = f"{queued[0].submission.job} to {queued[-1].submission.job}"
            left = f"; {len(queued)} of {len(parts.parts)} jobs are queued, {ids}"
            if isinstance(error, HpcddpError):
                raise type(error)(f"{error.message}{left}", error.hint) from error
            of_all = call_run(parts.sweep) if parts.sweep is not None else queued[0].submission.job
            raise SchedulerError(f"interrupted{left}", f"hpcddp cancel {of_all}") from error
        if find_scheduler(part.plan.site.scheduler).this_machine:
            before.append(done.submission)
    return queued


def _note(parts: Parts) -> None:
    assert parts.sweep is not None
    try:
        os.makedirs(parts.sweep.path, exist_ok=True)
        note_sweep(parts.sweep, parts.spec.sweep or {}, f"1-{len(parts.parts)}")
    except OSError as error:
        raise RequestError(
            f"{parts.sweep.path} cannot be written: {(error.strerror or str(error)).lower()}",
            "choose a folder that every node can write: --set run_dir=DIR",
        ) from error


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
        name = spec.name or name_command(spec.command or ("job",))
        run_dir = (spec.run_dir or f"runs/{name}").rstrip("/")
        folder = RunFolder(os.path.join(os.getcwd(), spec.workdir or "", run_dir))
        if os.path.isdir(folder.path) and not os.path.exists(folder.sweep):
            raise RequestError(f"{run_dir} is there already, and is no sweep", f"--name {name}-sweep")
        return [(one, "") for one in split_points(spec._replace(name=name), run_dir)], folder
    if row.this_machine and spec.array is not None:
        return [(spec._replace(array=None, array_limit=None), index) for index in _indices(spec.array)], None
    return [(spec, "")], None


def _indices(array: str) -> list[str]:
    found = re.fullmatch(r"(\d{1,9})-(\d{1,9})(?::([1-9]\d{0,8}))?", array, re.ASCII)
    if not found or int(found[1]) >= int(found[2]):
        raise RequestError(f"array {array!r} is not FIRST-LAST or FIRST-LAST:STEP", "--array 1-9")
    return [str(index) for index in range(int(found[1]), int(found[2]) + 1, int(found[3] or 1))]


def _with_kinds(spec: JobSpec, kinds: tuple[str, ...]) -> JobSpec:
    """`--after 12` and `--after train` as the dependencies that directives take: afterok:12, where there is such."""
    if not spec.dependency or not spec.sources.get("dependency", "").startswith("--after"):
        return spec
    return spec._replace(dependency=tuple(_dependency(word, kinds) for word in spec.dependency))


def _dependency(word: str, kinds: tuple[str, ...]) -> str:
    kind, colon, job = word.partition(":")
    if not colon:
        kind, job = "afterok" if "afterok" in kinds else kinds[0], word
    if not parse_id(job).is_job:
        ids = find_newest_jobs(find_run(job))
        if not ids:
            raise RequestError(f"--after {job}: no job of that run is known", "--after JOBID")
        job = ":".join(ids)
    return f"{kind}:{job}"


def _find_before(words: tuple[str, ...]) -> list[Submission]:
    """The jobs on this machine that the words name."""
    known = [one for run in list_all_runs() for one in read_submissions(run)]
    found = []
    for word in words:
        kind, *jobs = word.split(":")
        if kind not in {"afterany", "after"}:
            raise RequestError(
                f"--after {word}: on this machine a job waits for the end of others", "--after afterany:JOB"
            )
        for job in jobs:
            one = next((one for one in known if parse_id(one.job).is_same(parse_id(job))), None)
            if one is None:
                raise RequestError(f"there is no job {job} below runs/", "hpcddp status")
            found.append(one)
    return found
