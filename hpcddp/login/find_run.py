"""Finds runs by what people call them: a name below `runs/`, a folder, or the id of one of their jobs."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence

from hpcddp.errors import RequestError, nearest
from hpcddp.runs.folder import RUNS, RunFolder, job_of, list_attempts, list_folders, show_path
from hpcddp.runs.jsonfile import read_first_line
from hpcddp.runs.lock import read_holds
from hpcddp.runs.start import is_run
from hpcddp.runs.submitted import list_sweep_runs, read_submissions, read_sweep
from hpcddp.schedulers.job_id import JobId, is_in, parse_id
from hpcddp.schedulers.registry import find_scheduler

_SHOWN = 8  # runs in a hint


def find_runs(words: Sequence[str]) -> list[RunFolder]:
    """The run of each word, each once; without words all runs below `runs/`. RequestError for a word that no run
    has."""
    found = {os.path.abspath(run.path): run for run in map(find_run, words)}
    return list(found.values()) if words else list_all_runs()


def find_run(word: str) -> RunFolder:
    """The run of this name, folder or job id. RequestError if there is none, or a job id has several."""
    path = word.rstrip("/") or "/"
    below = RunFolder(os.path.join(RUNS, path))
    for run in (below, RunFolder(path)) if "/" not in path else (RunFolder(path), below):
        if is_run(run) or find_array_jobs(run):
            return run
    runs, job = list_all_runs(), parse_id(word)
    if job.is_job:
        of_job = [run for run in runs if any(job.is_same(one) for one in list_jobs(run))]
        if len(of_job) == 1:
            return of_job[0]
        if of_job:
            names = ", ".join(os.path.basename(run.path) for run in of_job[:8])
            raise RequestError(f"job {word} is of several runs: {names}", f"name one: {of_job[0].path}")
    if os.path.isdir(path) and "/" in word:
        raise RequestError(f"{path} is no run folder: no job has been in it", _list_hint(runs))
    near = nearest(os.path.basename(word), [os.path.basename(run.path) for run in runs])
    raise RequestError(f"there is no run '{word}'{near} in {RUNS}/", _list_hint(runs))


def format_run(run: RunFolder) -> str:
    """The word for this run in a command: its name, or its folder if it is not below `runs/`."""
    path = show_path(run.path)
    return shlex.quote(os.path.basename(path) if os.path.dirname(path) == RUNS else path)


def find_single_run(word: str, has: str, hint: str) -> RunFolder:
    """As `find_run`. RequestError for a sweep, whose runs have it each. `hint`: what to type for one of them."""
    run = find_run(word)
    if not os.path.exists(run.sweep):
        return run
    there, sweep = list_sweep_runs(run), read_sweep(run)
    first = re.search(r"\d+", sweep.array) if sweep is not None else None
    name = format_run(there[0]) if there else f"{format_run(run)}.{first[0] if first else 1}"
    raise RequestError(f"{run.path} is a sweep, and each of its runs has {has}", hint.format(name))


def list_all_runs() -> list[RunFolder]:
    """Every run below `runs/`, those of a number in the order of their numbers. RequestError if it cannot be read."""
    folders = sorted(list_folders(RUNS), key=lambda entry: _by_number(entry.name))
    return [run for entry in folders if is_run(run := RunFolder(entry.path))]


def list_jobs(run: RunFolder) -> list[JobId]:
    """All jobs that the run is known to have had or to wait for."""
    attempts = list_attempts(run)
    ids = [one.job for one in read_submissions(run)] + [job_of(attempt.name) for attempt in attempts]
    ids += filter(None, (read_first_line(attempt.next) for attempt in attempts))
    return [*map(parse_id, ids), *(hold.holder.id for hold in read_holds(run))]


def find_newest_jobs(run: RunFolder) -> list[str]:
    """The ids of the newest job of the run, or of each run of a sweep: that was submitted, has begun, or was queued as
    a follow-up last. A follow-up counts once the job before it has ended, which may take it back."""
    holds = [hold for hold in read_holds(run) if hold.holder.job]
    times = [(hold.holder.since, str(hold.holder.id)) for hold in holds]
    if holds and holds[-1].end is not None:
        follows = read_first_line(run.attempt(holds[-1].holder.attempt).next)
        times = [(holds[-1].holder.since, follows), *times] if follows else times
    times += [(one.since, one.job) for one in read_submissions(run)]
    if times:
        return [max(times, key=lambda one: one[0])[1]]
    return [job for one in list_sweep_runs(run) for job in find_newest_jobs(one)]


def find_array_jobs(run: RunFolder) -> list[tuple[str, JobId]]:
    """Scheduler and id of the job that each array of this run's sweep has for it, the newest one last."""
    index, folder = run.array_index, RunFolder(run.path.removesuffix(f".{run.array_index}"))
    sweep = read_sweep(folder) if index and folder.path else None
    if sweep is None or not is_in(sweep.array, index):
        return []
    arrays = [one for one in read_submissions(folder) if is_in(one.array, index)]
    of_index = [(one, find_scheduler(one.scheduler).commands.of_index) for one in arrays]
    return [(one.scheduler, parse_id(one.job).at(index, form)) for one, form in of_index]


def _by_number(name: str) -> tuple[object, ...]:
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name))


def _list_hint(runs: Sequence[RunFolder]) -> str:
    if not runs:
        return "cd to the folder that has its runs/"
    more = f"; hpcddp status shows all {len(runs)}" if len(runs) > _SHOWN else ""
    return f"one of: {', '.join(os.path.basename(run.path) for run in runs[:_SHOWN])}{more}"
