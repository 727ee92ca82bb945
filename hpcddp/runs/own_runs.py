"""Runs that the script of a job chooses itself: what its starts have in common, and which runs one has opened."""

from __future__ import annotations

import os
from contextlib import suppress

from hpcddp.record import TYPE_CHECKING
from hpcddp.runs.folder import RunFolder, job_of, list_holders, start_of
from hpcddp.runs.lock import read_end, read_holder

if TYPE_CHECKING:
    from hpcddp.runs.folder import AttemptFolder


def find_first_start(attempt: AttemptFolder) -> str:
    """The folder of the first attempt of this one's job; "" if no supervisor began this one.

    `hpcddp launch` that is typed again in one allocation, after the one before it has ended, is no start of that one's
    job. RequestError if the folder cannot be read; NewerFileError if a newer hpcddp wrote a holder.
    """
    job, first = job_of(attempt.name), ""
    for path in list_holders(attempt.run):
        holder = read_holder(path)
        if holder is None or not start_of(holder.attempt, job):
            continue
        first = first or holder.attempt
        if holder.attempt == attempt.name:
            return attempt.run.attempt(first).path
        if holder.by_hand and read_end(path)[0]:
            first = ""
    return ""


def note_own_run(attempt: AttemptFolder, run: RunFolder) -> None:
    """The script of this attempt has opened a run that is not the job's. What cannot be written is not known."""
    with suppress(OSError), open(_list(attempt), "a", encoding="utf-8", errors="surrogateescape") as file:
        file.write(f"{os.path.abspath(run.path)}\n")


def list_own_runs(attempt: AttemptFolder) -> list[RunFolder]:
    """In the order in which they were opened."""
    with suppress(OSError), open(_list(attempt), encoding="utf-8", errors="surrogateescape") as file:
        return [RunFolder(path) for path in dict.fromkeys(file.read().splitlines())]
    return []


def _list(attempt: AttemptFolder) -> str:
    return os.path.join(attempt.path, "own-runs")
