"""Asking a scheduler about a script without running it: what to type, and what the answers mean. Text in, text out."""

from __future__ import annotations

import re

from hpcddp.errors import RequestError, SchedulerError
from hpcddp.record import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcddp.schedulers.row import Answer, Scheduler


def find_id(pattern: str, answer: Answer) -> str | None:
    """The job's id in what a submit command has said, where a site's banner may stand around it; None: there is none.

    `pattern` is that of a whole line; its first group, if it has one, is the id.
    """
    lines = [line.strip() for line in answer.stdout.splitlines() if line.strip()]
    found = next(filter(None, (re.fullmatch(pattern, line) for line in reversed(lines))), None)
    return None if found is None or answer.status else found[1 if found.re.groups else 0]


def plan_question(scheduler: Scheduler, version: str | None) -> list[str]:
    """The command that takes the script on its standard input, and queues nothing that could run.

    `version` is what the submit command's `--version` printed, where that tells schedulers apart; None: not asked.
    """
    commands = scheduler.commands
    if not commands.question:
        raise RequestError(
            f"{scheduler.title} has no way to check a script before it is queued", "--check without =live"
        )
    if commands.version and commands.version not in (version or ""):
        program = commands.submit[0]
        raise SchedulerError(
            f"the {program} on PATH does not say that it is {scheduler.title}",
            f"run it where {scheduler.title}'s {program} is on PATH",
        )
    return list(commands.question)


def plan_deletion(scheduler: Scheduler, answer: Answer) -> list[str]:
    """The command that deletes the job that the question left; [] where it left none. SchedulerError for a no."""
    commands = scheduler.commands
    program = commands.question[0]
    if answer.status != 0:
        said = _first_lines(answer, program)
        raise SchedulerError(
            f"{program} refuses the script (status {answer.status}): {said}",
            "change the request; hpcddp sites show SITE has the limits",
        )
    if not commands.queued:
        return []
    job = find_id(commands.queued, answer)
    if job is None:
        raise SchedulerError(
            f"{program} answered {answer.stdout.strip()!r}, which is no job id",
            f"look for the held job, and delete it: {' '.join(commands.cancel)} JOB",
        )
    return [*commands.cancel, job]


def check_deleted(command: list[str], answer: Answer) -> None:
    """Raises SchedulerError if the held job is still there."""
    if answer.status != 0:
        *program, job = command
        said = _first_lines(answer, program[0])
        raise SchedulerError(f"the held job {job} could not be deleted: {said}", f"{' '.join(program)} '{job}'")


def describe_answer(scheduler: Scheduler, answer: Answer) -> str:
    """One line on a script that the scheduler takes, with what it says of when and where the job would run."""
    takes = f"{scheduler.title} takes the script"
    if scheduler.commands.queued:
        return f"{takes} (submitted held, and deleted)"
    said = scheduler.commands.describe(answer)
    return f"{takes}: {said}" if said else takes


def _first_lines(answer: Answer, program: str) -> str:
    """The two lines that say why, in the scheduler's words; usage texts are left out."""
    lines = [line.strip().strip("\0") for line in answer.stderr.splitlines()]
    usage = ("usage:", "[-", f"{program}: usage")
    return "; ".join([line for line in lines if line and not line.startswith(usage)][:2]) or "it gives no reason"
