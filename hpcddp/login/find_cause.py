"""Why a run has ended: its last attempt's logs, what its folder says, and the scheduler's record, together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress

from hpcddp.diagnose.cause import Cause, name_cause, show_line
from hpcddp.diagnose.job_record import add_record, diagnose_attempt, judge_record
from hpcddp.diagnose.judge import diagnose
from hpcddp.errors import HpcddpError, RequestError
from hpcddp.login.judge import LIVE, WAITING, RunStatus, find_status
from hpcddp.record import Record
from hpcddp.runs.folder import AttemptFolder, RunFolder, show_path
from hpcddp.runs.logs import LogFile, order_attempts
from hpcddp.runs.submitted import read_submissions
from hpcddp.schedulers.registry import scripted_schedulers
from hpcddp.schedulers.run import ask_job_history
from hpcddp.supervisor.notice import ON_END, ON_FAILURE, explain_cause, send_left


class RunCause(Record):
    """`remarks`: what could not be asked, and that a later job of the run lives."""

    cause: Cause
    remarks: tuple[str, ...] = ()


def find_cause(run: RunFolder, env: Mapping[str, str]) -> RunCause:
    """The first cause of the end of a run. RequestError if it has not ended."""
    found = find_status([run], env)
    status, remarks = found.runs[0], list(found.problems)
    if status.lives:
        attempts = _list_ended(run, status)
        if not attempts:
            raise RequestError(
                f"{show_path(run.path)} has not ended: it is {status.state}", f"hpcddp status {run.path}"
            )
        remarks.append(f"{show_path(run.path)} is {status.state} again; this is why attempt {attempts[-1].name} ended")
    if status.state == "finished" and not status.lives:
        return RunCause(Cause("none"), tuple(remarks))
    return RunCause(diagnose_status(run, status), tuple(remarks))


def diagnose_status(run: RunFolder, status: RunStatus) -> Cause:
    """The first cause of the end of a run with this status. No scheduler is asked."""
    attempts = _list_ended(run, status)
    output = [LogFile(one.output, "") for one in read_submissions(run)[-1:] if os.path.isfile(one.output)]
    if not attempts:
        return add_record(diagnose(output, has_failed=True), status.why, status.exit_status)
    has_failed = status.state != "ended"
    return diagnose_attempt(attempts[-1], status.why, status.exit_status, output=output, has_failed=has_failed)


def _list_ended(run: RunFolder, status: RunStatus) -> list[AttemptFolder]:
    """The attempts that have ended, in their order."""
    attempts = order_attempts(run)
    return attempts[:-1] if status.lives and status.state not in WAITING else attempts


def add_cause(run: RunFolder, status: RunStatus) -> RunStatus:
    """The status of a run that has failed, with the first line of its diagnosis; as it was where nothing says why."""
    cause = diagnose_status(run, status)
    if cause.class_ in {"unknown", "none"}:
        return status
    line = show_line(cause._replace(file=show_path(cause.file)))
    return status._replace(cause=f"{name_cause(cause)}: {line}")


def send_notices(run: RunFolder, status: RunStatus, env: Mapping[str, str]) -> list[str]:
    """Send the notices of a run that its jobs could not send; what did not work."""

    def describe_run() -> tuple[str, str, str]:
        if status.state != "failed":
            return ON_END, "has ended" if status.state in {"finished", "ended"} else f"is {status.state}", status.why
        cause = Cause("unknown")
        with suppress(HpcddpError):
            cause = diagnose_status(run, status)
        return ON_FAILURE, "has failed", explain_cause(cause, status.why)

    return send_left(order_attempts(run), env, None if status.lives else describe_run)


def find_cause_of_job(job: str, env: Mapping[str, str]) -> Cause:
    """Why a job ended of which only this machine's scheduler knows. RequestError if none knows it, or it lives."""
    problems = []
    for row in scripted_schedulers():
        if row.this_machine:
            continue
        found = ask_job_history(row.name, job, env)
        problems += [found.problem] if found.problem else []
        if found.jobs and found.jobs[-1].state in LIVE:
            raise RequestError(f"job {job} has not ended: it is {found.jobs[-1].state}", "hpcddp diagnose once it has")
        if found.jobs:
            return judge_record(found.jobs[-1].reason, found.jobs[-1].status, found.jobs[-1].state)
    problem = next((f" ({problem})" for problem in problems if "cannot be run" not in problem), "")
    raise RequestError(
        f"no scheduler here knows job {job}{problem}, and no run in runs/ has it", "hpcddp diagnose LOG …"
    )
