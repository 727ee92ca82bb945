"""Run folders as jobs leave them, made with the functions that jobs use."""

from __future__ import annotations

import json
from pathlib import Path

from hpcddp.runs.folder import AttemptFolder, RunFolder
from hpcddp.runs.lock import BY_HAND, Holder, release_run, take_run
from hpcddp.runs.submitted import Submission, begin_submission, record_submission


def submitted(run: RunFolder, job: str, array: str = "", scheduler: str = "slurm") -> Submission:
    """A job that `hpcddp submit` has queued."""
    folder = begin_submission(run, "#!/bin/bash\n")
    one = Submission(scheduler, job, "2026-11-24T00:00:00+0000", "login", "/", array)
    record_submission(folder, one)
    return one


#: When holds of the run begin here.
SINCE = "2026-01-01T12:00:00+0000"


def held(
    run: RunFolder,
    job: str,
    *,
    status: int | None = None,
    attempt: str = "",
    scheduler: str = "slurm",
    by_hand: bool = False,
) -> AttemptFolder:
    """An attempt of this job holds the run, on a host that is not this one; with a status it has ended."""
    of = run.attempt(attempt or f"{job}{f'{BY_HAND}7' if by_hand else ''}.1")
    holder = Holder(of.name, "node1", "", 1, "1", scheduler, job, since=SINCE)
    take_run(run, holder, lambda _scheduler, _job: "gone")
    Path(of.path).mkdir(parents=True)
    if status is not None:
        release_run(run, of.name, status)
    return of


def metrics(attempt: AttemptFolder, steps: int, total: int | None = None, seconds_per_step: float = 2.0) -> None:
    """Step lines, as rank 0 writes them."""
    lines = [{"kind": "start", "schema": 1, "time": 0.0}]
    if total is not None:
        lines.append({"kind": "expect", "total_steps": total, "time": 0.0})
    for step in range(1, steps + 1):
        lines.append(
            {"kind": "step", "step": step, "epoch": 0, "loss": 1 / step, "samples_per_s": 50.0, "lr": 0.1}
            | {"time": step * seconds_per_step}
        )
    Path(attempt.metrics).write_text("".join(json.dumps(line) + "\n" for line in lines))
