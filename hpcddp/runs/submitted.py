"""The jobs of a run: those that `hpcddp submit` queued, those of a sweep, and the one that an attempt runs in.

`submitted/000001`, … is made before its job is queued, with the script, and says afterwards which job it was: without
`submission.json` it is none.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress

from hpcddp.errors import RequestError
from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.runs.folder import RunFolder, list_folders, list_numbered
from hpcddp.runs.jsonfile import DamagedFileError, read_record, write_object
from hpcddp.schedulers.job_id import is_in

if TYPE_CHECKING:
    from hpcddp.runs.folder import AttemptFolder


class Submission(Record):
    """One job. `array`: its indices. `process`, `started` and `machine`: of a job on this machine without a
    scheduler."""

    scheduler: str
    job: str  # the id, as the scheduler printed it
    since: str  # when it was submitted, ISO 8601 with the zone
    host: str  # where it was submitted
    folder: str  # the working directory then
    array: str = ""
    walltime_s: int | None = None
    output: str = ""  # the file with the job's output, where that is known
    process: int = 0
    started: str = ""
    machine: str = ""
    supervised: bool = True  # whether a process of hpcddp's leaves word of the job in the run's folder


def script_of(folder: str) -> str:
    return os.path.join(folder, "script.sh")


def begin_submission(run: RunFolder, script: str) -> str:
    """The folder of a new submission, with its script. OSError if it cannot be written."""
    os.makedirs(run.submitted, exist_ok=True)
    last = ["0", *map(os.path.basename, _list_folders(run))][-1]
    path = os.path.join(run.submitted, f"{int(last) + 1:06d}")
    os.mkdir(path)
    with open(script_of(path), "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(script)
    os.chmod(script_of(path), 0o755)  # noqa: S103  # it is a script, and holds nothing that others may not read
    return path


def record_submission(folder: str, submission: Submission) -> None:
    write_object(_about(folder), submission._asdict(), durable=True)


def drop_submission(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def read_submissions(run: RunFolder) -> list[Submission]:
    """The jobs that were submitted for the run, the first one first. SchemaError if another hpcddp wrote one."""
    found = []
    for folder in _list_folders(run):
        with suppress(DamagedFileError):
            one = read_record(_about(folder), Submission)
            found += [one] if one is not None and one.job else []
    return found


def _list_folders(run: RunFolder) -> list[str]:
    with suppress(RequestError):
        return list_numbered(run.submitted)
    return []


def _about(folder: str) -> str:
    return os.path.join(folder, "submission.json")


class Sweep(Record):
    """`sweep.json`, in a folder that is no run but a sweep, or an array without axes; its runs lie beside it. `array`:
    its indices, `1-9%2`."""

    axes: dict[str, list[str]]
    array: str


def record_sweep(run: RunFolder, axes: Mapping[str, Sequence[str]], array: str) -> None:
    """Record that this folder is a sweep's or an array's. OSError if it cannot be written."""
    write_object(run.sweep, Sweep({name: list(values) for name, values in axes.items()}, array)._asdict())


def read_sweep(run: RunFolder) -> Sweep | None:
    """Read the sweep of this folder; None for a run. DamagedFileError."""
    return read_record(run.sweep, Sweep)


def list_sweep_runs(run: RunFolder) -> list[RunFolder]:
    """The runs of a sweep's folder, `NAME.7`, as far as they are there; none of a run's folder. DamagedFileError."""
    sweep = read_sweep(run)
    if sweep is None:
        return []
    parent, name = os.path.split(run.path)
    names = [entry.name for entry in list_folders(parent or ".")]
    numbers = [RunFolder(one).array_index for one in names if one == f"{name}.{RunFolder(one).array_index}"]
    return [RunFolder(f"{run.path}.{one}") for one in sorted(filter(None, numbers), key=int) if is_in(sweep.array, one)]


class JobEnd(Record):
    """`attempts/<name>/job.json`: the job that an attempt runs in, and when it ends, as its supervisor knows it.
    `nodes`: all of the job, spare ones too. `ends`: seconds since 1970; None: never. `source`: of that. `warns`: when
    the ranks get the signal that the job file asks for."""

    scheduler: str
    job: str  # the scheduler's id; "" on this machine
    nodes: int = 1
    ends: int | None = None
    source: str = ""
    warns: int | None = None


def record_job_end(attempt: AttemptFolder, end: JobEnd) -> None:
    """Replace the attempt's `job.json`. OSError if it cannot be written."""
    write_object(attempt.job, end._asdict())


def read_job_end(attempt: AttemptFolder) -> JobEnd | None:
    """Read the job's end; None if no supervisor has written it, or it is damaged. SchemaError."""
    with suppress(DamagedFileError):
        return read_record(attempt.job, JobEnd)
    return None
