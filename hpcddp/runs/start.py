"""The start of an attempt: its run is chosen, and taken so that no other job writes it."""

from __future__ import annotations

import os
from functools import partial

from hpcddp.record import TYPE_CHECKING
from hpcddp.runs.choice import Origin, choose_run
from hpcddp.runs.folder import number_attempt
from hpcddp.runs.holder import describe_process
from hpcddp.runs.lock import HeldError, find_live_holder, take_run
from hpcddp.runs.opening import check_attempt
from hpcddp.schedulers.registry import find_current_job

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpcddp.runs.choice import Asked, RunChoice
    from hpcddp.runs.folder import AttemptFolder

_TRIES = 100  # each one that fails means that another job has begun the run meanwhile


def foresee_run(asked: Asked) -> str | None:
    """One line on the run that a job would get if it started now; None if it would be the first of its name, or the
    folder of the runs is not here. RequestError and SchemaError of `choose_run`."""
    if not os.path.isdir(os.path.dirname(asked.base)):
        return None
    choice = choose_run(asked, Origin())
    if choice.is_new and not choice.why:
        return None
    mine = describe_process("", os.getpid(), {}, asked.command)
    holder = None if choice.is_new else find_live_holder(choice.run, mine, lambda _scheduler, _job: None)
    taken = f"; it was taken by {holder}, and two jobs cannot write one run" if holder is not None else ""
    return f"if the job started now: {choice}{taken}"


def hold_run(
    attempt: AttemptFolder, env: Mapping[str, str], command: tuple[str, ...], *, process: int, by_hand: bool = False
) -> None:
    """Hold the run that something else chose for this attempt, with the errors of `start_run`."""
    from hpcddp.schedulers.run import ask_job_state

    check_attempt(attempt)
    mine = describe_process(attempt.name, process, env, command, by_hand=by_hand)
    take_run(attempt.run, mine, partial(ask_job_state, env=env))


def start_run(
    asked: Asked,
    attempt: str,
    env: Mapping[str, str],
    *,
    process: int,
    by_hand: bool = False,
    numbered: bool = False,
    within: str = "",
    restart: int = 0,
    earlier: tuple[str, ...] = (),
) -> RunChoice:
    """Choose the run of this attempt, and hold it. `process`: what lives as long as the attempt, on this host.
    `numbered`: `attempt` is the job's name, and the attempt's is made of it (`number_attempt`). `within`, `restart`,
    `earlier`: of a run that a script of a job chooses itself, as in `Origin`.

    RequestError or SchemaError of `choose_run`; HeldError if another job holds the run; LaunchError if the folder
    cannot be written.
    """
    from hpcddp.schedulers.run import ask_job_state

    job = find_current_job(env)
    asked = asked.of_index(job.array_index if job is not None else "")
    mine = describe_process(attempt, process, env, asked.command, by_hand=by_hand, within=within, restart=restart)
    ask = partial(ask_job_state, env=env)
    for left in reversed(range(_TRIES)):
        origin = Origin(attempt, mine.scheduler, mine.job, by_hand, within, restart, mine.job_start, earlier)
        choice = choose_run(asked, origin)
        name = number_attempt(choice.run, attempt) if numbered else attempt
        mine = mine._replace(attempt=name)
        check_attempt(choice.run.attempt(name))
        try:
            take_run(choice.run, mine, ask, choice.before, asked.spelling.own)
        except HeldError:
            if choice.is_new and left:
                continue  # another job began this run first
            raise
        return choice._replace(attempt=name)
    raise AssertionError("the last try returns or raises")
