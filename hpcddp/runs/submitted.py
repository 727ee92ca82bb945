"""`submitted/000001`, …: the jobs that `hpcddp submit` handed to a scheduler for a run, each with its script.

A folder is made before its job is queued, and says afterwards which job it was: without `submission.json` it is none.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress

from hpcddp.record import Record
from hpcddp.runs.folder import RunFolder
from hpcddp.runs.jsonfile import DamagedFileError, read_record, write_object

_TAKES_S = 120  # the longest that a scheduler's answer is waited for, twice
_TRIES = 100  # each one that fails means that another submission has taken the number


class Submission(Record):
    """One job. `array`: its indices, each with a run of its own. `process`, `started` and `machine`: of a job on this
    machine without a scheduler, its process, when that started in the kernel's clock ticks, and on which kernel."""

    scheduler: str
    job: str  # the id, as the scheduler printed it
    since: str  # when it was submitted, ISO 8601 with the zone
    host: str  # where it was submitted
    folder: str  # the working directory then
    array: str = ""
    walltime_s: int | None = None
    name: str = ""
    output: str = ""  # the file with the job's output, where that is known
    process: int = 0
    started: str = ""
    machine: str = ""
    supervised: bool = True  # whether a process of hpcddp's leaves word of the job in the run's folder


def script_of(folder: str) -> str:
    """The job script in a submission's folder."""
    return os.path.join(folder, "script.sh")


def begin_submission(run: RunFolder, script: str) -> str:
    """The folder of a new submission, with its script. OSError if it cannot be written."""
    for _ in range(_TRIES):
        numbers = [int(name) for name in _names(run)]
        path = os.path.join(run.submitted, f"{max(numbers, default=0) + 1:06d}")
        os.makedirs(run.submitted, exist_ok=True)
        try:
            os.mkdir(path)
        except FileExistsError:
            continue
        with open(script_of(path), "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(script)
        os.chmod(script_of(path), 0o755)  # noqa: S103  # it is a script, and holds nothing that others may not read
        return path
    raise FileExistsError(f"{run.submitted}: other submissions take every number")


def is_begun_beside(folder: str) -> bool:
    """Whether another submission for the same run is under way: its folder is there, is young, and says no job yet."""
    parent, own = os.path.split(folder)
    for name in _names_in(parent):
        other = os.path.join(parent, name)
        with suppress(OSError):
            young = time.time() - os.stat(other).st_mtime < _TAKES_S
            if name != own and young and not os.path.exists(_about(other)):
                return True
    return False


def note_submission(folder: str, submission: Submission) -> None:
    """The job was queued. OSError if it cannot be written."""
    write_object(_about(folder), submission._asdict(), durable=True)


def drop_submission(folder: str) -> None:
    """The job was not queued: nothing is left of it, and of a run that was made for it alone."""
    shutil.rmtree(folder, ignore_errors=True)


def has_submissions(run: RunFolder) -> bool:
    """Whether any was begun, and not dropped."""
    return bool(_names(run))


def read_submissions(run: RunFolder) -> list[Submission]:
    """The jobs that were submitted for the run, the first one first. One that cannot be read is left out.

    SchemaError if another hpcddp wrote one.
    """
    return [one for _, one in list_submissions(run)]


def list_submissions(run: RunFolder) -> list[tuple[str, Submission]]:
    """The same, each behind the file that says so."""
    folders = [os.path.join(run.submitted, name) for name in _names(run)]
    return [(_about(folder), one) for folder in folders if (one := _read(folder)) is not None]


def _read(folder: str) -> Submission | None:
    with suppress(DamagedFileError):
        one = read_record(_about(folder), Submission)
        return one if one is not None and one.job else None
    return None


def _names(run: RunFolder) -> list[str]:
    return _names_in(run.submitted)


def _names_in(folder: str) -> list[str]:
    try:
        return sorted((name for name in os.listdir(folder) if name.isdecimal()), key=int)
    except OSError:
        return []


def _about(folder: str) -> str:
    return os.path.join(folder, "submission.json")
