"""The start of a job's attempt: its run is chosen and taken, its folder made, and what the script says left in it."""

from __future__ import annotations

import os
import select
import shutil
from functools import partial

from hpcddp.errors import HpcddpError
from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.runs.chain import find_before, start_attempt
from hpcddp.runs.choice import Asked, start_run
from hpcddp.runs.command import identify_command
from hpcddp.runs.folder import AttemptFolder, RunFolder, cannot_write, list_attempts, start_of
from hpcddp.runs.jsonfile import write_object
from hpcddp.runs.lock import HeldError, describe_process, release_run, start_time
from hpcddp.runs.state import read_state
from hpcddp.supervisor.order import job_record

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hpcddp.runs.lock import Holder
    from hpcddp.schedulers.registry import CurrentJob
    from hpcddp.supervisor.order import Order

#: The variable by which `hpcddp launch` says that one allocation may see several attempts: the number of its process,
#: which becomes this one. A job that is submitted from such a rank inherits the variable, but not the number.
BY_HAND = "HPCDDP_LAUNCH"
_EARLIER_S = 600.0  # in which the scheduler kills what an earlier start of the job has left


class Begun(Record):
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
    *,
    by_hand: bool,
) -> Begun | int:
    """The attempt, which holds its run; the exit status where nothing is left to do.

    The errors of `start_run` and `start_attempt`; LaunchError if the folder cannot be written.
    """
    if order.resumed_run and _is_finished(RunFolder(os.path.join(os.path.dirname(base), order.resumed_run)), job.name):
        tell(f"nothing is left to do: run {order.resumed_run}, which this job was to resume, has finished meanwhile")
        return 0
    asked = Asked(base, identify_command(order.line.command), order.fresh, order.resume, made=order.made_run)
    start = partial(start_run, asked, job.name, env, process=os.getpid(), by_hand=by_hand, numbered=True)
    try:
        choice = start()
    except HeldError as error:
        if by_hand or error.holder is None or not _wait_for_earlier_start(error.holder, env, tell):
            raise
        choice = start()
    tell(str(choice))
    attempt = choice.run.attempt(choice.attempt)
    left = 0
    try:
        if order.chain:
            decision, link, left, of_several = start_attempt(attempt, order.chain)
            if not decision.starts:
                tell(f"the chain ends here: {decision.reason}")
                release_run(attempt.run, attempt.name)
                return 1 if decision.is_failure else 0
            more = " of the runs of its script together" if of_several else ""
            tell(f"attempt {link.turn} of at most {order.chain}, from step {link.step}{more}")
        _leave_records(order, base, attempt, script)
    except HpcddpError:
        release_run(attempt.run, attempt.name)
        raise
    return Begun(attempt, left)


def _wait_for_earlier_start(holder: Holder, env: Mapping[str, str], tell: Callable[[str], None]) -> bool:
    """Whether the holder, an earlier start of this very job on this host, has ended: PBS starts a job again while the
    processes of its earlier start still end. False at once for any other holder."""
    mine = describe_process("", os.getpid(), env, ())
    is_own = holder.job != "" and (holder.scheduler, holder.job) == (mine.scheduler, mine.job)
    is_earlier = holder.job_start != "" and holder.job_start != mine.job_start
    if not (is_own and is_earlier and holder.host == mine.host):
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


def _is_finished(run: RunFolder, job: str) -> bool:
    """By another job. What is left of this one's own work, and of its chain's, `start_attempt` and the script find."""
    state = read_state(run)
    if state is None or state.status != "finished":
        return False
    mine = [one for one in list_attempts(run) if start_of(one.name, job)]
    return not mine and find_before(run.attempt(f"{job}.1")) is None


def make_folders(attempt: AttemptFolder) -> None:
    """The attempt's own, and those in it that its ranks write to."""
    for folder in ("logs", "env"):
        os.makedirs(os.path.join(attempt.path, folder), exist_ok=True)


def _leave_records(order: Order, base: str, attempt: AttemptFolder, script: str) -> None:
    run = attempt.run
    try:
        make_folders(attempt)
        if script and os.path.isfile(script):  # a script on bash's standard input is none
            shutil.copyfile(script, attempt.script)
        write_object(run.plan, job_record(order, base))
    except OSError as error:
        raise cannot_write(run, error) from error
