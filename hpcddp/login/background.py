"""Jobs on a machine without a scheduler: the script in the background, in a session of its own, with the same verbs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from hpcddp.processes import find_machine, list_processes, process_lives, read_argv, read_stat, start_time
from hpcddp.runs.folder import RunFolder
from hpcddp.runs.lock import Holder
from hpcddp.runs.submitted import Submission, script_of
from hpcddp.schedulers.job_id import parse_id
from hpcddp.schedulers.row import JobFound
from hpcddp.schedulers.run import start_detached
from hpcddp.supervisor.leftover import find_left

# It waits for the processes of the jobs before it, and then becomes the script, so that its process number stays.
_START = 'for before; do tail --pid="$before" -f /dev/null; done; exec bash "$0"'


def name_job(number: int) -> str:
    """An id for a job that is submitted now, as the `number`th of this process."""
    return f"local-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}" + (f"-{number}" if number > 1 else "")


def start_job(submission: Submission, folder: str, env: Mapping[str, str], before: Sequence[Submission]) -> Submission:
    """Start the script of `folder`, once all jobs `before` it have ended. The submission with its process.
    SchedulerError."""
    env = {**env, "HPCDDP_JOB_ID": submission.job}
    argv = ["bash", "-c", _START, script_of(folder), *(str(one.process) for one in before if job_lives(one))]
    process = start_detached(argv, env, folder=submission.folder, output=submission.output)
    return submission._replace(process=process, started=start_time(process), machine=find_machine())


def job_lives(one: Submission) -> bool | None:
    """Whether its process still lives; None if that cannot be seen from this machine."""
    return process_lives(one.process, one.started, one.host, one.machine)


def find_job(one: Submission) -> JobFound | None:
    """Find a job on this machine, in the form in which a scheduler's jobs are shown; None: it has ended."""
    job, alive = parse_id(one.job), job_lives(one)
    if alive is None:
        return JobFound(job, "unknown", reason=f"it runs on {one.host}, and only there can it be seen")
    if alive and _is_waiting(one.process):
        return JobFound(job, "queued", reason="waits for the jobs before it")
    return JobFound(job, "running") if alive else None


def end_job(submission: Submission, *, kill: bool) -> bool:
    """Ask it to end, or kill it with all that it has started in its session. Whether it was there."""
    if not job_lives(submission):
        return False
    with suppress(ProcessLookupError):
        if kill:
            _kill_session(submission.process)
        elif _is_waiting(submission.process) or not submission.supervised:
            os.killpg(submission.process, signal.SIGTERM)  # the shell, and what waits or runs in it
        else:
            os.kill(submission.process, signal.SIGTERM)  # the supervisor, which hands it on
    return True


def end_process(run: RunFolder, holder: Holder, *, kill: bool) -> bool:
    """Ask a run's process to save and stop, or kill it with all that it has started. Whether it was there."""
    if start_time(holder.process) != holder.started:
        return False
    with suppress(ProcessLookupError):
        marks = {"HPCDDP_RUN_DIR": os.path.abspath(run.path), "HPCDDP_ATTEMPT": holder.attempt}
        started = find_left(marks, {}) if kill else []
        os.kill(holder.process, signal.SIGKILL if kill else signal.SIGTERM)
        for process in started:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    return True


def _kill_session(session: int) -> None:
    for process in list_processes():
        stat = read_stat(process)
        if stat is not None and stat.session == session:
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)


def _is_waiting(process: int) -> bool:
    """Whether it is still the shell that waits for another job."""
    return _START in read_argv(process)
