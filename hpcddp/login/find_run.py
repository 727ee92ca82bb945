"""Finds runs by what people call them: a name below `runs/`, a folder, or the id of one of their jobs."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress

from hpcddp.errors import RequestError, nearest
from hpcddp.runs.choice import is_run
from hpcddp.runs.folder import RunFolder, job_of, list_attempts, list_holders, list_runs, show_path
from hpcddp.runs.holder import Holder
from hpcddp.runs.jsonfile import read_text
from hpcddp.runs.lock import read_holder
from hpcddp.runs.submitted import list_submissions, read_submissions
from hpcddp.runs.sweep_folder import has_index, is_in, list_points, read_sweep
from hpcddp.schedulers.registry import find_scheduler

#: Where runs are, unless a job file says otherwise.
RUNS = "runs"


def find_runs(words: Sequence[str], folder: str = RUNS) -> list[RunFolder]:
    """The run of each word, in this order, each once; without words all runs in `folder`, in the order of their names.

    RequestError for a word that no run has.
    """
    if not words:
        return list_all_runs(folder)
    found: dict[str, RunFolder] = {}
    for word in words:
        run = find_run(word, folder)
        found[os.path.abspath(run.path)] = run
    return list(found.values())


def find_run(word: str, folder: str = RUNS) -> RunFolder:
    """The run of this name, folder or job id. RequestError if there is none, or a job id has several."""
    path = word.rstrip("/") or "/"
    beside = RunFolder(os.path.join(folder, path))
    for run in (beside, RunFolder(path)) if "/" not in path else (RunFolder(path), beside):
        if is_run(run) or find_waiting_point(run) is not None:
            return run
    runs = list_all_runs(folder)
    if re.match(r"\d", word) or word.startswith("local-"):
        of_job = [run for run in runs if _has_job(run, word)]
        if len(of_job) > 1:  # Slurm gives the last of an array's jobs the array's own id
            arrays = [run for run in of_job if any(is_same_job(word, one.job) for one in read_submissions(run))]
            of_job = arrays if len(arrays) == 1 else of_job
        if len(of_job) == 1:
            return of_job[0]
        if not of_job:
            waiting = [run for sweep in runs for run in [_find_index(sweep, word)] if run is not None]
            if waiting:
                return waiting[0]
        if of_job:
            names = ", ".join(os.path.basename(run.path) for run in of_job[:8])
            raise RequestError(f"job {word} is of several runs: {names}", f"name one: {of_job[0].path}")
    if os.path.isdir(path) and "/" in word:
        raise RequestError(f"{path} is no run folder: no job has been in it", _list_hint(runs))
    raise RequestError(f"there is no run '{word}'{_near(runs, word)} in {folder}/", _list_hint(runs))


def call_run(run: RunFolder) -> str:
    """What people can call this run in a command: its name, or its folder where it is not below `runs/`."""
    path = show_path(run.path)
    return shlex.quote(os.path.basename(path) if os.path.dirname(path) == RUNS else path)


def call_first(run: RunFolder) -> str:
    """The same for the first run of a sweep or an array, also before it has begun. DamagedFileError."""
    there, sweep = list_points(run), read_sweep(run)
    first = re.search(r"\d+", sweep[1]) if sweep is not None else None
    return call_run(there[0]) if there else f"{call_run(run)}.{first[0] if first else 1}"


def list_all_runs(folder: str = RUNS) -> list[RunFolder]:
    """Every run in the folder, those of a number in the order of their numbers. RequestError if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise RequestError(f"{folder} cannot be read: {(error.strerror or '').lower()}", f"ls -ld {folder}") from error
    runs = (RunFolder(os.path.join(folder, name)) for name in sorted(names, key=_by_number))
    return [run for run in runs if is_run(run)]


def list_jobs(run: RunFolder) -> list[str]:
    """The ids of all jobs that the run is known to have had or to wait for, each once: submitted ones, those that have
    held it, and the follow-ups of a chain."""
    ids = [one.job for one in read_submissions(run)]
    ids += [holder.job for path in list_holders(run) if (holder := read_holder(path)) is not None and holder.job]
    ids += filter(None, map(read_follow_up, (attempt.next for attempt in list_attempts(run))))
    return list(dict.fromkeys(ids))


def find_newest_jobs(run: RunFolder) -> list[str]:
    """The ids of the newest job of the run, or of each run of a sweep; of an array its own. The newest one is the one
    that was submitted, has begun, or was queued as a follow-up last."""
    times: list[tuple[float, str]] = []
    for folder, one in list_submissions(run):
        times.append((_changed(folder), one.job))
    for path in list_holders(run):
        holder = read_holder(path)
        if holder is not None and holder.job:
            times.append((_changed(path), own_job(holder)))
    for attempt in list_attempts(run):
        if follows := read_follow_up(attempt.next):
            times.append((_changed(attempt.next), follows))
    if times:
        return [max(times, key=lambda one: one[0])[1]]
    return [job for point in list_points(run) for job in find_newest_jobs(point)]


def _changed(path: str) -> float:
    with suppress(OSError):
        return os.stat(path).st_mtime
    return 0.0


def read_follow_up(path: str) -> str:
    """The job id in an attempt's `next`; "" where there is none."""
    try:
        return read_text(path).strip()
    except (FileNotFoundError, NotADirectoryError):
        return ""


def is_same_job(one: str, other: str) -> bool:
    """Whether two texts are one job's id: with or without its server, `47` and `47.pbs1`, and in each scheduler's way
    of an array's index, `47_3`, `47[3].pbs1` and `47-3`, the name that attempts have."""
    return _plain(one) == _plain(other)


def own_job(holder: Holder) -> str:
    """The id of the job that holds the run; of one of an array with its index, where all have the array's id."""
    own = job_of(holder.attempt)
    index = own.removeprefix(f"{holder.job}-")
    return f"{holder.job}_{index}" if own != index and index.isdecimal() else holder.job


def find_waiting_point(run: RunFolder) -> tuple[str, str] | None:
    """Scheduler and job of a sweep's or array's point that has no folder yet, by the name that this has: `lr.7`."""
    found = [] if is_run(run) else find_array_jobs(run)
    return found[-1] if found else None


def find_array_jobs(run: RunFolder) -> list[tuple[str, str]]:
    """Scheduler and id of the job that each array of this run's sweep has for it, the newest one last; of `lr.7` with
    index 7, or of `lr.7-2` where that is the newest run of the index."""
    base, _, tail = run.path.rpartition(".")
    number, _, again = tail.partition("-")
    if not re.fullmatch(r"\d+(-\d+)?", tail, re.ASCII) or not base:
        return []
    sweep = RunFolder(base)
    arrays = [one for one in read_submissions(sweep) if is_in(one.array, int(number))]
    if not arrays or not has_index(sweep, int(number)):
        return []
    if (again or is_run(run)) and [one.path for _, one in list_runs(f"{base}.{number}")][-1:] != [run.path]:
        return []
    return [(one.scheduler, spell_index(one.scheduler, one.job, number)) for one in arrays]


def spell_index(scheduler: str, job: str, index: str) -> str:
    """The id of one job of an array, as its scheduler takes it."""
    if "[]" in job:
        return job.replace("[]", f"[{index}]")
    of_index = find_scheduler(scheduler).commands.of_index or "{job}_{index}"
    return of_index.format(job=job, index=index)


def is_job_id(text: str) -> bool:
    """Whether a job can be called so: by its number, perhaps with an array's index and the server's name."""
    return text.startswith("local-") or _plain(text) != text or text.isdecimal()


def _plain(job: str) -> str:
    number = re.fullmatch(r"(\d+)(?:\[(\d*)\]|[_-](\d+))?(?:\.[A-Za-z][\w.-]*)?", job, re.ASCII)
    if number is None:
        return job
    index = number[2] or number[3]
    return f"{number[1]}-{index}" if index else number[1]


def _has_job(run: RunFolder, word: str) -> bool:
    names = [job_of(attempt.name) for attempt in list_attempts(run)]
    return any(is_same_job(word, job) for job in (*list_jobs(run), *names))


def _find_index(sweep: RunFolder, word: str) -> RunFolder | None:
    """The point of this sweep's array that has not begun, by the id of its job."""
    index = _plain(word).rpartition("-")[2]
    run = RunFolder(f"{sweep.path}.{index}")
    waiting = find_waiting_point(run) if index.isdecimal() else None
    return run if waiting is not None and is_same_job(waiting[1], word) else None


def _by_number(name: str) -> tuple[object, ...]:
    """`train`, `train-2`, `train-10`; `lr.2` before `lr.10`."""
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name))


def _near(runs: Sequence[RunFolder], word: str) -> str:
    return nearest(os.path.basename(word), [os.path.basename(run.path) for run in runs])


def _list_hint(runs: Sequence[RunFolder]) -> str:
    if not runs:
        return "cd to the folder that has its runs/"
    names = [os.path.basename(run.path) for run in runs]
    return f"one of: {', '.join(names)}" if len(names) <= 8 else f"hpcddp status shows all {len(names)}"
