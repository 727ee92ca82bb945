"""The paths of a run folder. A file that only one module reads and writes is named there, such as a holder's.

`hpcddp exec` imports this in every rank, so it needs little more of the standard library than `os`, and paths are plain
strings.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from hpcddp.errors import LaunchError, RequestError
from hpcddp.record import Record

MANIFEST = "manifest.json"
#: Where a run lies that has a name and no folder: below it, in the job's folder.
RUNS = "runs"
#: The variable with the words of the job's command, as they were typed, and what is between two of them in it.
COMMAND, SEPARATOR = "HPCDDP_COMMAND", "\x1f"
_STEP = "step-"


class _Below:
    """The path of this name in a folder."""

    def __init__(self, *name: str) -> None:
        self._name = os.path.join(*name)

    def __get__(self, folder: RunFolder | AttemptFolder, _kind: object) -> str:
        return os.path.join(folder.path, self._name)


class _RunPath(Record):
    path: str


class RunFolder(_RunPath):
    """`runs/<name>`: all of a training, over all its attempts."""

    __slots__ = ()
    about = _Below("run.json")  # when it was begun, and for which program
    plan = _Below("plan.json")  # what the job is: its site, launcher, size and command
    state = _Below("state.json")
    settings = _Below("settings.json")  # what it was trained with, for the comparison with each later start
    checkpoints = _Below("checkpoints")
    attempts = _Below("attempts")
    holders = _Below("holders")  # the attempts that have held it, by number; the last one may hold it
    submitted = _Below("submitted")  # the jobs that `hpcddp submit` queued for it, by number
    sweep = _Below("sweep.json")  # of a sweep, which is no run: its axes; its runs lie beside it, `NAME.1`, …
    rendezvous = _Below("rendezvous")  # where rank 0 publishes its address if no launcher gives it

    @property
    def array_index(self) -> str:
        """`7` of `NAME.7`, the run of one index of a sweep or an array; "" of another name."""
        number = self.path.rpartition(".")[2] if "." in self.path else ""
        return number if number.isascii() and number.isdigit() and str(int(number)) == number else ""

    def stop_request(self, job: str) -> str:
        return os.path.join(self.path, "stop", job)

    def attempt(self, name: str) -> AttemptFolder:
        return AttemptFolder(self, name)


class _AttemptName(Record):
    run: RunFolder
    name: str


class AttemptFolder(_AttemptName):
    """`attempts/<name>` in a run folder: one start of the launcher, `<job>.<n>` where a job script made it."""

    __slots__ = ()
    next = _Below("next")  # the id of the job that this one has queued, as the scheduler printed it
    lost = _Below("lost")  # why it ended, if it has lost ranks
    script = _Below("script.sh")  # the job script that started it
    log = _Below("logs", "job.log")  # what its ranks print, beside the job's own output
    job = _Below("job.json")  # the job that it runs in, and when that ends
    chain = _Below("chain.json")
    opened = _Below("runs")  # the other folders that its ranks have named, one a line
    metrics = _Below("metrics.jsonl")
    versions = _Below("versions.json")

    @property
    def path(self) -> str:
        return os.path.join(self.run.attempts, self.name)

    def usage(self, host: str) -> str:
        return os.path.join(self.path, f"usage-{host}.jsonl")

    def rank_environment(self, rank: int) -> str:
        return os.path.join(self.path, "env", f"rank-{rank:04d}.env")

    def rank_log(self, rank: int, host: str) -> str:
        return os.path.join(self.path, "logs", f"rank-{rank:04d}.{host}.log")


def find_attempt(env: Mapping[str, str], run_dir: str | None = None) -> AttemptFolder | None:
    """The attempt that HPCDDP_ATTEMPT names, in `run_dir` or HPCDDP_RUN_DIR, with an absolute path; None outside of
    one. LaunchError for a name that leads out of the run folder."""
    path, name = run_dir or env.get("HPCDDP_RUN_DIR"), env.get("HPCDDP_ATTEMPT")
    if name and ("/" in name or name in {".", ".."}):
        raise LaunchError(f"HPCDDP_ATTEMPT={name!r} is no name of a folder", "unset HPCDDP_ATTEMPT; job scripts set it")
    return AttemptFolder(RunFolder(os.path.join(os.getcwd(), path)), name) if path and name else None


def choose_attempt(env: Mapping[str, str], run_dir: str | None = None) -> AttemptFolder | None:
    """As `find_attempt`; without HPCDDP_ATTEMPT a new attempt, named by time and process. None without a run folder."""
    name = f"local-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}"
    return find_attempt({**env, "HPCDDP_ATTEMPT": env.get("HPCDDP_ATTEMPT") or name}, run_dir)


def cannot_write(run: RunFolder, error: OSError) -> LaunchError:
    hint = "make room there, or choose another folder that every node can write: run_dir in the job file"
    why = (error.strerror or str(error)).lower()
    return LaunchError(f"the run folder {run.path} cannot be written: {why}", hint)


def list_attempts(run: RunFolder) -> list[AttemptFolder]:
    """The attempts by name. No order of time: names are job ids."""
    return [run.attempt(entry.name) for entry in list_folders(run.attempts)]


def number_attempt(run: RunFolder, job: str) -> str:
    """`<job>.<n>`, the name of the next attempt of this job: each start of the launcher has a folder of its own."""
    starts = [number for other in list_attempts(run) if (number := start_of(other.name, job))]
    return f"{job}.{max(starts, default=0) + 1}"


def start_of(attempt: str, job: str) -> int:
    """Which start of this job the attempt is, from 1; 0 if it is none of it."""
    number = attempt.removeprefix(f"{job}.")
    return int(number) if number != attempt and number.isdecimal() else 0


def job_of(attempt: str) -> str:
    """The job's part of an attempt's name; all of a name that no supervisor gave."""
    job, _, number = attempt.rpartition(".")
    return job if job and number.isdecimal() else attempt


def list_checkpoints(checkpoints: str) -> list[str]:
    """The finished checkpoints in this folder, oldest first. Partial, damaged and removed ones have other names."""
    names = (entry.name for entry in list_folders(checkpoints))
    found = [name for name in names if name.startswith(_STEP) and name[len(_STEP) :].isdecimal()]
    return [os.path.join(checkpoints, name) for name in sorted(found, key=step_of)]


def list_numbered(path: str) -> list[str]:
    """The folders `000001`, `000002`, … in this folder, in order."""
    found = [entry for entry in list_folders(path) if entry.name.isdecimal()]
    return [entry.path for entry in sorted(found, key=lambda entry: int(entry.name))]


def list_run_folders(path: str) -> list[str]:
    """The folders in this folder that are runs, whatever their names."""
    found = [RunFolder(entry.path) for entry in list_folders(path)]
    return [run.path for run in found if os.path.isfile(run.about) or os.path.isdir(run.attempts)]


def name_checkpoint(checkpoints: str, step: int) -> str:
    return os.path.join(checkpoints, f"{_STEP}{step:08d}")


def show_path(path: str) -> str:
    return os.path.relpath(path) if path.startswith(os.getcwd().rstrip("/") + "/") else path


def step_of(checkpoint: str) -> int:
    return int(os.path.basename(checkpoint)[len(_STEP) :])


def list_folders(path: str) -> list[os.DirEntry[str]]:
    """RequestError if the folder cannot be read; one that is not there is empty."""
    try:
        with os.scandir(path) as entries:
            return sorted((entry for entry in entries if entry.is_dir()), key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        where = error.filename or path  # a link in it may be what cannot be followed
        raise RequestError(
            f"{where} cannot be read: {(error.strerror or str(error)).lower()}", f"ls -ld {where}"
        ) from error
