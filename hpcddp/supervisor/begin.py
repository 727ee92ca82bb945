"""The start of a job's attempt: its run is begun or taken again, and what the script says is left in its folder."""

from __future__ import annotations

import os
import select
import shutil
from functools import partial

from hpcddp.errors import HpcddpError, RequestError
from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.runs.chain import find_before, start_attempt
from hpcddp.runs.command import identify_command
from hpcddp.runs.folder import AttemptFolder, RunFolder, cannot_write, job_of
from hpcddp.runs.jsonfile import write_object
from hpcddp.runs.lock import HeldError, release_run, start_time
from hpcddp.runs.start import Request, start
from hpcddp.supervisor.order import job_record

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hpcddp.runs.lock import Holder
    from hpcddp.schedulers.registry import CurrentJob
    from hpcddp.supervisor.order import Order

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

    The errors of `start` and `start_attempt`; LaunchError if the folder cannot be written.
    """
    if order.scratch and os.path.exists(base):
        raise RequestError(f"{base} is there already, and --scratch would remove it", "leave out --scratch")
    request = Request(base, identify_command(order.line.command), order.fresh, order.resume)
    link = find_before(RunFolder(base).attempt(job.name))
    before = job_of(link.attempt) if link is not None else ""
    begin_or_resume = partial(start, request, job.name, env, process=os.getpid(), numbered=True, before=before)
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
            decision, turn, left, of_several = start_attempt(attempt, order.chain)
            if not decision.starts:
                tell(f"the chain ends here: {decision.reason}")
                release_run(attempt.run, attempt.name)
                return 1 if decision.is_failure else 0
            more = " of the runs of its script together" if of_several else ""
            tell(f"attempt {turn.turn} of at most {order.chain}, from step {turn.step}{more}")
        _leave_records(order, base, attempt, script)
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


def _leave_records(order: Order, base: str, attempt: AttemptFolder, script: str) -> None:
    run = attempt.run
    try:
        make_folders(attempt)
        if script and os.path.isfile(script):  # a script on bash's standard input is none
            shutil.copyfile(script, attempt.script)
        write_object(run.plan, job_record(order, base))
    except OSError as error:
        raise cannot_write(run, error) from error
