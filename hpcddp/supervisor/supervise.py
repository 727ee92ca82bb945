"""A job from its start to its end: the run is taken, data copied to the nodes, the launcher started and watched."""

from __future__ import annotations

import os
import time

from hpcddp.record import TYPE_CHECKING
from hpcddp.runs.lock import release_run
from hpcddp.supervisor.begin import begin
from hpcddp.supervisor.end import end_attempt
from hpcddp.supervisor.follow import FollowUp
from hpcddp.supervisor.job import find_end, find_own_job
from hpcddp.supervisor.leftover import end_left
from hpcddp.supervisor.order import split_stage
from hpcddp.supervisor.program import Ended, Launcher, Signals, name_of, watch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hpcddp.runs.folder import AttemptFolder
    from hpcddp.supervisor.job import End
    from hpcddp.supervisor.order import Order

#: The variable by which `hpcddp launch` says that one allocation may see several attempts.
BY_HAND = "HPCDDP_LAUNCH"
#: The variable with the folder of the copied data: of all attempts, in the script; of this one, in the ranks.
STAGED = "HPCDDP_STAGED"


def supervise(order: Order, words: list[str], script: str, env: Mapping[str, str], tell: Callable[[str], None]) -> int:
    """The exit status of the job. `words`: the launcher's command line, and what copies data before it.

    The errors of `find_own_job` and `begin`: then nothing was started.
    """
    signals = Signals()
    job = find_own_job(order.scheduler, env)
    by_hand = BY_HAND in env
    begun = begin(order, env["HPCDDP_RUN_DIR"], job, env, script, tell, by_hand=by_hand)
    if isinstance(begun, int):
        return begun
    attempt = begun.attempt
    try:
        end = find_end(job, env, order.walltime_s, by_hand=by_hand)
        if end.at is not None:
            tell(f"the job ends at {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(end.at))} ({end.source})")
        follow_up = FollowUp(job, end, env, tell)
        if begun.left:
            follow_up.queue(attempt, order.follow_options)
        ended = _run(order, words, {**env, **_variables(attempt, end, env)}, signals, follow_up, attempt, end, tell)
    finally:
        release_run(attempt.run, attempt.name)
    return end_attempt(attempt, ended, follow_up if order.chain else None, tell)


def _variables(attempt: AttemptFolder, end: End, env: Mapping[str, str]) -> dict[str, str]:
    """What the ranks are told of their attempt."""
    told = {
        "HPCDDP_RUN_DIR": attempt.run.path,
        "HPCDDP_ATTEMPT": attempt.name,
        "HPCDDP_DEADLINE": "" if end.at is None else str(end.at),
        "HPCDDP_LOG_RANKS": "1",  # every rank but the first writes into a file of its own
    }
    return told | ({STAGED: os.path.join(env[STAGED], f"hpcddp-{attempt.name}")} if STAGED in env else {})


def _run(
    order: Order,
    words: list[str],
    env: Mapping[str, str],
    signals: Signals,
    follow_up: FollowUp,
    attempt: AttemptFolder,
    end: End,
    tell: Callable[[str], None],
) -> Ended:
    """Copy the data, if there are any to copy, and start the ranks; nothing is started once a signal has come."""
    warn_at = end.at - order.warns_s if order.warns_s and end.at is not None else None
    stage, launch = split_stage(words)
    ended = Ended(0)
    for program, passes_on, warned in ((stage, "TERM", None), (launch, order.passes_on, warn_at)):
        for number in signals.read():
            follow_up.hear(number)
            ended = Ended(128 + number, name_of(number))
            tell(f"{ended.signal} came before the ranks were started")
        if ended.status or ended.signal:
            return ended
        if program:
            launcher = Launcher(program, env, attempt.log)
            ended = watch(launcher, signals, passes_on, warned, order, tell, follow_up.hear)
            end_left({name: env[name] for name in ("HPCDDP_RUN_DIR", "HPCDDP_ATTEMPT")}, tell)
            launcher.finish_output()
            if ended.status and program is stage:
                tell(f"the data could not be copied to the nodes (status {ended.status}); no rank was started")
    if ended.status:
        logs = os.path.dirname(attempt.log)
        tell(f"the launcher ended with status {ended.status}; the ranks' logs are in {logs}")
    return ended
