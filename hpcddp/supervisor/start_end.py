"""The start of a job's attempt: it takes the run, and records what the script asks for. And its end: what is recorded,
whether the follow-up stays queued, and the status of the job."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress

from hpcddp.errors import UNFINISHED, HpcddpError, RequestError
from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.runs import chain
from hpcddp.runs.command import identify_command
from hpcddp.runs.folder import RunFolder, cannot_write, job_of, show_path
from hpcddp.runs.lock import HeldError, release_run
from hpcddp.runs.start import RunRequest, start_run
from hpcddp.runs.state import (
    RunState,
    correct_killed,
    correct_signal,
    read_state,
    replace_state,
    step_back,
    write_plan_file,
)
from hpcddp.supervisor.order import describe_job

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hpcddp.runs.folder import AttemptFolder
    from hpcddp.schedulers.registry import CurrentJob
    from hpcddp.supervisor.events import Event
    from hpcddp.supervisor.follow import FollowUp
    from hpcddp.supervisor.order import Order
    from hpcddp.supervisor.program import AttemptEnd

#: The variable by which `hpcddp launch` says that one allocation may see several attempts: the number of its process,
#: which becomes this one. A job that is submitted from such a rank inherits the variable, but not the number.
LAUNCHED = "HPCDDP_LAUNCH"
_EARLIER_S, _AGAIN_S = 600.0, 10.0  # in which the scheduler kills what an earlier start of the job has left


class StartedAttempt(Record):
    """`left`: how many attempts may follow, in a chain."""

    attempt: AttemptFolder
    left: int = 0


def begin(
    order: Order, base: str, job: CurrentJob, env: Mapping[str, str], script: str, emit: Callable[[str], None]
) -> StartedAttempt | int:
    """The attempt, which holds its run; the exit status where a chain ends here.

    The errors of `start_run` and `start_attempt`; LaunchError if the folder cannot be written.
    """
    if order.scratch and os.path.exists(base):
        raise RequestError(f"{base} is there already, and --scratch would remove it", "leave out --scratch")
    request = RunRequest(base, identify_command(order.line.command), order.fresh, order.resume)
    queued_by = chain.find_before(RunFolder(base).attempt(job.name))
    before = job_of(queued_by.attempt) if queued_by is not None else ""
    began = time.monotonic()
    while True:
        try:
            outlook = start_run(request, job.name, env, process=os.getpid(), numbered=True, before=before)
            break
        except HeldError as error:  # PBS starts a job again while the processes of its earlier start still end
            is_earlier_start = error.holder is not None and job_of(error.holder.attempt) == job.name
            if not is_earlier_start or time.monotonic() - began > _EARLIER_S:
                raise
        emit("the job was started again, and its earlier start still ends: it waits")
        time.sleep(_AGAIN_S)
    emit(str(outlook))
    attempt = outlook.run.attempt(outlook.attempt)
    left = 0
    try:
        if order.chain:
            decision, link = chain.start_attempt(attempt, order.chain)
            if decision.reason:
                emit(f"the chain ends here: {decision.reason}")
                release_run(attempt.run, attempt.name)
                return 1 if decision.is_failure else 0
            left = link.left
            more = " of the runs of its script together" if chain.list_job_runs(attempt) else ""
            emit(f"attempt {link.turn} of at most {order.chain}, from step {link.step}{more}")
        _leave_records(order, attempt, script)
    except HpcddpError:
        release_run(attempt.run, attempt.name)
        raise
    return StartedAttempt(attempt, left)


def make_folders(attempt: AttemptFolder) -> None:
    """Make the attempt's folder, and those in it that its ranks write to."""
    for folder in ("logs", "env"):
        os.makedirs(os.path.join(attempt.path, folder), exist_ok=True)


def _leave_records(order: Order, attempt: AttemptFolder, script: str) -> None:
    run = attempt.run
    try:
        make_folders(attempt)
        if script and os.path.isfile(script):  # a script on bash's standard input is none
            shutil.copyfile(script, attempt.script)
        write_plan_file(run, describe_job(order))
    except OSError as error:
        raise cannot_write(run, error) from error


def end_attempt(
    attempt: AttemptFolder, ended: AttemptEnd, follow_up: FollowUp | None, emit: Callable[[str], None]
) -> int:
    """The exit status of the job. `follow_up`: of a chain."""
    if follow_up is not None:
        follow_up.wait()
    try:
        cause = ended.cause if ended.cause is not None and ended.cause.is_loss else None
        if ended.signal:
            for run in (attempt.run, *chain.list_opened(attempt)):  # the launcher may have handed on another signal
                correct_signal(run.attempt(attempt.name), ended.signal)
            if cause is not None:  # another rank may have failed by the loss, and written `failed`
                _set_back(attempt, cause, ("failed",))
        elif cause is not None:
            record_loss(attempt, cause)
        state = read_state(attempt.run)
        state = None if state is None else correct_killed(attempt.run, state)
        is_left = state is not None and chain.is_unfinished(state, attempt.name)
        left = [] if is_left else chain.find_unfinished_runs(attempt)
        is_cut_off = _is_cut_off(attempt, ended, state)
    except HpcddpError as error:
        emit(str(error))
        return ended.status or error.exit_code
    if state is not None and is_left:
        emit(f"unfinished: step {state.step} ({state.reason})")
    elif not left and is_cut_off:
        emit("unfinished: no step of a run is left, but the program was ended before it came to its end")
    elif not left:
        if follow_up is not None:
            follow_up.cancel("nothing is left to do")
        return ended.status
    for run, state in left:
        emit(f"unfinished: run {show_path(run.path)}, step {state.step} ({state.reason})")
    follows = follow_up is not None and follow_up.is_queued()
    return ended.status if follows else ended.status or UNFINISHED


def _is_cut_off(attempt: AttemptFolder, ended: AttemptEnd, state: RunState | None) -> bool:
    """Whether a program was ended behind a training, or between two of them: nobody knows what it still wanted."""
    was_ended = bool(ended.signal) or (ended.cause is not None and ended.cause.is_loss_of_work)
    if not (ended.status and was_ended):
        return False
    return (state is not None and state.status == "finished") or bool(chain.list_job_runs(attempt))


def record_loss(attempt: AttemptFolder, cause: Event) -> None:
    """Set the runs back to their newest checkpoints, whatever a rank has written that failed because another was lost:
    the program has not failed."""
    with suppress(OSError), open(attempt.lost, "w", encoding="utf-8", errors="replace") as file:
        file.write(f"{cause}\n")
    _set_back(attempt, cause, ("unfinished", "failed"))


def _set_back(attempt: AttemptFolder, cause: Event, statuses: tuple[str, ...]) -> None:
    for run in (attempt.run, *chain.list_opened(attempt)):
        state = read_state(run)
        if state is not None and state.attempt == attempt.name and state.status in statuses:
            with suppress(OSError):
                replace_state(run, step_back(run, state, str(cause)))
