"""The start of a job's attempt: its run is begun or taken again, and what the script says is left in its folder. And
its end: what is written of that, what becomes of the follow-up, and the status of the job."""

from __future__ import annotations

import os
import select
import shutil
from contextlib import suppress
from functools import partial

from hpcddp.errors import UNFINISHED, HpcddpError, RequestError
from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.runs.chain import (
    find_before,
    find_unfinished_runs,
    is_unfinished,
    list_job_runs,
    list_opened,
    start_attempt,
)
from hpcddp.runs.command import identify_command
from hpcddp.runs.folder import AttemptFolder, RunFolder, cannot_write, job_of, show_path
from hpcddp.runs.lock import HeldError, release_run, start_time
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

    from hpcddp.runs.lock import Holder
    from hpcddp.schedulers.registry import CurrentJob
    from hpcddp.supervisor.events import Event
    from hpcddp.supervisor.follow import FollowUp
    from hpcddp.supervisor.order import Order
    from hpcddp.supervisor.program import AttemptEnd

#: The variable by which `hpcddp launch` says that one allocation may see several attempts: the number of its process,
#: which becomes this one. A job that is submitted from such a rank inherits the variable, but not the number.
LAUNCHED = "HPCDDP_LAUNCH"
_EARLIER_S = 600.0  # in which the scheduler kills what an earlier start of the job has left


class StartedAttempt(Record):
    """`left`: how many attempts may follow, in a chain."""

    attempt: AttemptFolder
    left: int = 0


def begin(
    order: Order,
    base: str,
    job: CurrentJob,
    env: Mapping[str, str],
    script: str,
    tell: Callable[[str], None],
) -> StartedAttempt | int:
    """The attempt, which holds its run; the exit status where a chain ends here.

    The errors of `start_run` and `start_attempt`; LaunchError if the folder cannot be written.
    """
    if order.scratch and os.path.exists(base):
        raise RequestError(f"{base} is there already, and --scratch would remove it", "leave out --scratch")
    request = RunRequest(base, identify_command(order.line.command), order.fresh, order.resume)
    queued_by = find_before(RunFolder(base).attempt(job.name))
    before = job_of(queued_by.attempt) if queued_by is not None else ""
    begin_or_resume = partial(start_run, request, job.name, env, process=os.getpid(), numbered=True, before=before)
    try:
        outlook = begin_or_resume()
    except HeldError as error:
        if error.holder is None or not _wait_for_earlier_start(error.holder, job.name, tell):
            raise
        outlook = begin_or_resume()
    tell(str(outlook))
    attempt = outlook.run.attempt(outlook.attempt)
    left = 0
    try:
        if order.chain:
            decision, link = start_attempt(attempt, order.chain)
            if decision.reason:
                tell(f"the chain ends here: {decision.reason}")
                release_run(attempt.run, attempt.name)
                return 1 if decision.is_failure else 0
            left = link.left
            more = " of the runs of its script together" if list_job_runs(attempt) else ""
            tell(f"attempt {link.turn} of at most {order.chain}, from step {link.step}{more}")
        _leave_records(order, attempt, script)
    except HpcddpError:
        release_run(attempt.run, attempt.name)
        raise
    return StartedAttempt(attempt, left)


def _wait_for_earlier_start(holder: Holder, job: str, tell: Callable[[str], None]) -> bool:
    """Whether the holder, an earlier start of this very job on this host, has ended: PBS starts a job again while the
    processes of its earlier start still end. False at once for any other holder."""
    if job_of(holder.attempt) != job or holder.host != os.uname().nodename:
        return False
    try:
        process = os.pidfd_open(holder.process)
    except ProcessLookupError:
        return True
    except (OSError, AttributeError):  # an old kernel
        return False
    try:
        if start_time(holder.process) != holder.started:
            return True  # the number is another process's now
        tell(f"the job was started again, and process {holder.process} of its earlier start still ends: it waits")
        poll = select.poll()
        poll.register(process, select.POLLIN)
        return bool(poll.poll(_EARLIER_S * 1000))
    finally:
        os.close(process)


def make_folders(attempt: AttemptFolder) -> None:
    """The attempt's own, and those in it that its ranks write to."""
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


# The end.


def end_attempt(
    attempt: AttemptFolder, ended: AttemptEnd, follow_up: FollowUp | None, tell: Callable[[str], None]
) -> int:
    """The exit status of the job. `follow_up`: of a chain."""
    if follow_up is not None:
        follow_up.wait()
    try:
        if ended.signal:
            _name_signal(attempt, ended.signal, tell)
            if ended.cause is not None and ended.cause.is_loss:
                _correct_failed(attempt, ended.cause)
        elif ended.cause is not None and ended.cause.is_loss:
            record_loss(attempt, ended.cause)
        state = _read_end(attempt)
        is_left = state is not None and is_unfinished(state, attempt.name)
        left = [] if is_left else find_unfinished_runs(attempt)
        is_cut_off = _is_cut_off(attempt, ended, state)
    except HpcddpError as error:
        tell(str(error))
        return ended.status or error.exit_code
    if state is not None and is_left:
        tell(f"unfinished: step {state.step} ({state.reason})")
    elif not left and is_cut_off:
        tell("unfinished: no step of a run is left, but the program was ended before it came to its end")
    elif not left:
        if follow_up is not None:
            follow_up.cancel("nothing is left to do")
        return ended.status
    for run, its in left:
        tell(f"unfinished: run {show_path(run.path)}, step {its.step} ({its.reason})")
    follows = follow_up is not None and follow_up.is_queued()
    return ended.status if follows else ended.status or UNFINISHED


def _is_cut_off(attempt: AttemptFolder, ended: AttemptEnd, state: RunState | None) -> bool:
    """Whether a program was ended behind a training, or between two of them: nobody knows what it still wanted."""
    was_ended = bool(ended.signal) or (ended.cause is not None and ended.cause.is_loss_of_work)
    if not (ended.status and was_ended):
        return False
    return (state is not None and state.status == "finished") or bool(list_job_runs(attempt))


def record_loss(attempt: AttemptFolder, cause: Event) -> None:
    """The run is where its newest checkpoint is, whatever a rank wrote that has seen another one end: a rank, several
    and a whole node are lost alike, and the program has not failed."""
    with suppress(OSError), open(attempt.lost, "w", encoding="utf-8", errors="replace") as file:
        file.write(f"{cause}\n")
    _step_back(attempt, cause, lambda status: status != "finished")


def _correct_failed(attempt: AttemptFolder, cause: Event) -> None:
    """A signal came, and ranks were lost before or after it: one that has seen that may have written `failed`."""
    _step_back(attempt, cause, lambda status: status == "failed")


def _step_back(attempt: AttemptFolder, cause: Event, applies: Callable[[str], bool]) -> None:
    for run in (attempt.run, *list_opened(attempt)):
        state = read_state(run)
        if state is not None and state.attempt == attempt.name and applies(state.status):
            with suppress(OSError):
                replace_state(run, step_back(run, state, str(cause)))


def _read_end(attempt: AttemptFolder) -> RunState | None:
    """The state, also of ranks that were killed before they could write that they end."""
    state = read_state(attempt.run)
    return None if state is None else correct_killed(attempt.run, state)


def _name_signal(attempt: AttemptFolder, name: str, tell: Callable[[str], None]) -> None:
    """The launcher may have handed on another signal: the state names the one that was sent, or nobody caught it."""
    opened = list_opened(attempt)
    named = [correct_signal(run.attempt(attempt.name), name) for run in (attempt.run, *opened)]
    if any(named) or opened or os.path.exists(attempt.metrics):
        return
    state = read_state(attempt.run)  # the loops of other frameworks write no metrics
    if state is None or state.attempt != attempt.name:
        tell(
            f"ended after {name}; no rank had opened hpcddp.runtime(), or loop() or attach() of hpcddp.integrations:"
            " hpcddp does not know whether the program has saved"
        )
