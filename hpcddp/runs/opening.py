"""A run folder is opened: by this hpcddp, if it knows the folder's layout."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from hpcddp.record import Record
from hpcddp.runs.best import read_best
from hpcddp.runs.folder import MANIFEST, AttemptFolder, RunFolder, cannot_write, list_checkpoints
from hpcddp.runs.jsonfile import DamagedFileError, read_object, read_record, write_object
from hpcddp.runs.metrics import check_metrics


class Plan(Record):
    """What is read again of a run's `plan.json`. `point`: of a sweep."""

    global_batch: int | None = None
    run_dir: str = ""
    point: dict[str, Any] | None = None


def check_run_folder(run: RunFolder) -> None:
    """SchemaError if another hpcddp made the folder."""
    read_object(run.about, "; then restore it, or remove it: the next attempt writes it again")


def check_attempt(attempt: AttemptFolder) -> None:
    """SchemaError if another hpcddp wrote a file that the attempt or its job script would replace, append to, or
    remove with the old checkpoints. DamagedFileError for a `best.json` that does not say which checkpoint is to be
    kept; RequestError if a folder or metrics.jsonl cannot be read."""
    check_run_folder(attempt.run)
    manifests = [os.path.join(path, MANIFEST) for path in list_checkpoints(attempt.run.checkpoints)]
    for path in (attempt.run.plan, attempt.run.state, attempt.versions, attempt.data, *manifests):
        with suppress(DamagedFileError):
            read_object(path)
    check_metrics(attempt.metrics)
    read_best(attempt.run.checkpoints)


def open_attempt(attempt: AttemptFolder) -> None:
    """Make the attempt's folder. LaunchError if that is not possible.

    The errors of `check_attempt` come before anything is written.
    """
    try:
        check_attempt(attempt)
        os.makedirs(attempt.path, exist_ok=True)
        if not os.path.exists(attempt.run.about):
            write_object(attempt.run.about, {})
    except OSError as error:
        raise cannot_write(attempt.run, error) from error


def read_plan(run: RunFolder) -> Plan:
    """Without anything where there is no such file. DamagedFileError; SchemaError if another hpcddp wrote it."""
    return read_record(run.plan, Plan, "; then render the job again, or remove it") or Plan()


def read_planned_batch(run: RunFolder) -> int | None:
    """The global batch of the job plan that the script left in the run folder; None if it left none.

    RequestError if the plan cannot be read, or is another hpcddp's.
    """
    check_run_folder(run)
    return read_plan(run).global_batch
