"""The end of an attempt: what is written of it, what becomes of the follow-up, and the status of the job."""

from __future__ import annotations

import os
from contextlib import suppress

from hpcddp.errors import UNFINISHED, HpcddpError
from hpcddp.record import TYPE_CHECKING
from hpcddp.runs.chain import find_left, is_unfinished, list_job_runs, list_opened
from hpcddp.runs.folder import show_path
from hpcddp.runs.state import State, correct_killed, name_signal, read_state, replace_state, step_back

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpcddp.runs.folder import AttemptFolder
    from hpcddp.supervisor.events import Event
    from hpcddp.supervisor.follow import FollowUp
    from hpcddp.supervisor.program import Ended


def end_attempt(attempt: AttemptFolder, ended: Ended, follow_up: FollowUp | None, tell: Callable[[str], None]) -> int:
    """The exit status of the job. `follow_up`: of a chain."""
    if follow_up is not None:
        follow_up.settle()
    try:
        if ended.signal:
            _name_signal(attempt, ended.signal, tell)
            if ended.cause is not None and ended.cause.is_loss:
                _correct_failed(attempt, ended.cause)
        elif ended.cause is not None and ended.cause.is_loss:
            note_lost(attempt, ended.cause)
        state = _read_end(attempt)
        is_left = state is not None and is_unfinished(state, attempt.name)
        left = [] if is_left else find_left(attempt)
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
    follows = follow_up is not None and follow_up.is_waiting()
    return ended.status if follows else ended.status or UNFINISHED


def _is_cut_off(attempt: AttemptFolder, ended: Ended, state: State | None) -> bool:
    """Whether a program was ended behind a training, or between two of them: nobody knows what it still wanted."""
    was_ended = bool(ended.signal) or (ended.cause is not None and ended.cause.is_loss_of_work)
    if not (ended.status and was_ended):
        return False
    return (state is not None and state.status == "finished") or bool(list_job_runs(attempt))


def note_lost(attempt: AttemptFolder, cause: Event) -> None:
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


def _read_end(attempt: AttemptFolder) -> State | None:
    """The state, also of ranks that were killed before they could write that they end."""
    state = read_state(attempt.run)
    return None if state is None else correct_killed(attempt.run, state, lambda: False)


def _name_signal(attempt: AttemptFolder, name: str, tell: Callable[[str], None]) -> None:
    """The launcher may have handed on another signal: the state names the one that was sent, or nobody caught it."""
    opened = list_opened(attempt)
    named = [name_signal(run.attempt(attempt.name), name) for run in (attempt.run, *opened)]
    if any(named) or opened or os.path.exists(attempt.metrics):
        return
    state = read_state(attempt.run)  # the loops of other frameworks write no metrics
    if state is None or state.attempt != attempt.name:
        tell(
            f"ended after {name}; no rank had opened hpcddp.runtime(), or loop() or attach() of hpcddp.integrations:"
            " hpcddp does not know whether the program has saved"
        )
