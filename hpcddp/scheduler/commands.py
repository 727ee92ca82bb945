"""Asking the scheduler about a script without running it: what to type, and what its answers mean."""

from __future__ import annotations

import re
from typing import NamedTuple

from hpcddp.errors import RequestError, SchedulerError


class Answer(NamedTuple):
    """What a program said."""

    status: int
    stdout: str
    stderr: str


def question(scheduler: str, version: str | None) -> list[str]:
    """The command that takes the script on its standard input, and queues nothing that could run.

    `version` is what `qsub --version` printed: Grid Engine and Torque have a qsub, too. OpenPBS has no dry run, so the
    job is submitted held (`-h`) and has to be deleted: see `deletion`.
    """
    if scheduler == "slurm":
        return ["sbatch", "--test-only"]
    if scheduler != "pbs":
        raise RequestError(f"the scheduler {scheduler} cannot be asked about a script", "--check without =live")
    if version is None or "pbs_version" not in version:
        raise SchedulerError("the qsub on PATH does not say that it is PBS", "run it where PBS's qsub is on PATH")
    return ["qsub", "-h"]


def deletion(scheduler: str, answer: Answer) -> list[str]:
    """The command that takes back what the question left; [] where it left nothing. Raises SchedulerError for no."""
    if answer.status != 0:
        raise SchedulerError(_words(scheduler, answer), "change the request; hpcddp sites show SITE has the limits")
    if scheduler == "slurm":
        return []
    job = answer.stdout.strip()
    if not re.fullmatch(r"\d+(\[\])?\.\S+", job):
        raise SchedulerError(f"qsub answered {job!r}, which is no job id", "look for a held job: qstat -u $USER")
    return ["qdel", job]


def check_deleted(command: list[str], answer: Answer) -> None:
    """Raises SchedulerError if the held job is still there."""
    if answer.status != 0:
        job = command[-1]
        raise SchedulerError(f"the held job {job} could not be deleted: {_first(answer)}", f"qdel '{job}'")


def verdict(scheduler: str, answer: Answer) -> str:
    """What the scheduler said of a script that it takes: for Slurm also when and where it would run."""
    if scheduler == "pbs":
        return "PBS takes the script (submitted held, and deleted)"
    said = [line for line in answer.stderr.splitlines() if line.startswith("sbatch: Job ")]
    return f"Slurm takes the script: {said[-1].removeprefix('sbatch: ')}" if said else "Slurm takes the script"


def _words(scheduler: str, answer: Answer) -> str:
    name = {"pbs": "qsub", "slurm": "sbatch"}[scheduler]
    return f"{name} refuses the script (status {answer.status}): {_first(answer)}"


def _first(answer: Answer) -> str:
    """The lines that tell, in the scheduler's words: usage texts are left out."""
    lines = [line.strip().strip("\0") for line in answer.stderr.splitlines()]
    told = [line for line in lines if line and not line.startswith(("usage:", "[-", "sbatch: usage"))]
    return "; ".join(told[:2]) or "without a word"
