"""The scheduler's job around this process: its name, when it ends, and whether its owner wants it to end."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress

from hpcddp.errors import LaunchError, RequestError
from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.runs.holder import start_time
from hpcddp.schedulers.registry import CurrentJob, find_current_job, find_scheduler
from hpcddp.schedulers.run import ask_about, read_job_state
from hpcddp.supervisor.asked import ask_beside
from hpcddp.units import parse_walltime, read_number

if TYPE_CHECKING:
    from _queue import SimpleQueue
    from collections.abc import Callable, Mapping

    from hpcddp.schedulers.row import Answer

_PATIENCE_S = 10.0  # a scheduler that is busy must not hold up the job's start and end
#: A job that is signalled earlier than this before its end is not ended by its walltime.
_EARLY_S = 60
#: The source of an end that no scheduler said.
BY_SCRIPT = "as the script says"
_ASK_AGAIN_S = 300.0
_SAME_S = 10  # schedulers round, and count from different moments


class End(Record):
    """`at`: seconds since 1970; None: nothing ends the job. `source`: who says so."""

    at: int | None
    source: str

    def __str__(self) -> str:
        return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(self.at))} ({self.source})"


def find_job_of_script(scheduler: str, env: Mapping[str, str]) -> CurrentJob:
    """The job of a script for this scheduler, on this machine without an id. LaunchError where it runs in none."""
    row, job = find_scheduler(scheduler), find_current_job(env, scheduler)
    if row.this_machine:
        own = time.strftime("local-%Y%m%dT%H%M%S-") + str(os.getpid())
        return CurrentJob(scheduler, "", (job.name if job is not None else "") or own)
    if job is None or not job.id:
        raise LaunchError(
            f"{row.variables.job_id[0]} is not set: this is a job script for {row.title}",
            f"{row.commands.submit[0]} SCRIPT, or hpcddp launch -- COMMAND",
        )
    return job


def find_end(job: CurrentJob, env: Mapping[str, str], walltime_s: int | None, *, by_hand: bool) -> End:
    """When the job ends: by the scheduler's variable, else by its word, else by the script's walltime. An end that is
    asked for by hand, in an allocation, may come before the allocation's."""
    row = find_scheduler(job.scheduler)
    asked = None if walltime_s is None else End(_script_start() + walltime_s, BY_SCRIPT)
    told = read_number(env.get(row.variables.end, "")) if row.variables.end else None
    if told is not None:
        end = End(told, f"as {row.variables.end} says")
    elif job.id and (answer := ask_about(job.scheduler, job.id, env, _PATIENCE_S)) is not None:
        said = row.commands.parse_end(answer)
        end = End(said, f"as {row.commands.state[0]} says")
    else:
        end = End(None, "")
    # `hpcddp launch` without a walltime asks for what is left of the allocation, which is no end of its own.
    if end.at is None or (by_hand and asked is not None and asked.at is not None and asked.at < end.at - _SAME_S):
        return asked or End(None, "")
    return end


def read_walltime(scheduler: str, script: str) -> int | None:
    """What the directives of the job's script ask for, for a scheduler that does not answer. Seconds."""
    rule = find_scheduler(scheduler).directives
    if not rule.walltime or not script:
        return None
    with suppress(OSError, RequestError), open(script, errors="replace") as file:
        found = re.findall(rule.walltime, "".join(line for line in file if line.startswith(rule.prefix)))
        return parse_walltime(found[-1]) if found else None
    return None


class MovingEnd:
    """The job's end, which its owner or an operator may move while it runs. `clock`: seconds, from anywhere."""

    def __init__(
        self, job: CurrentJob, end: End, env: Mapping[str, str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.end = end
        self._job, self._env, self._clock = job, env, clock
        self._asked = clock()
        self._answers: SimpleQueue[Answer | None] | None = None

    def look(self) -> bool:
        """Whether it is another one than it was said to be. Asks the scheduler now and then, and does not wait."""
        job, env = self._job, self._env
        if self._answers is None:
            if job.id and self.end.at is not None and self._clock() - self._asked >= _ASK_AGAIN_S:
                self._answers = ask_beside(lambda: ask_about(job.scheduler, job.id, env, _PATIENCE_S))
            return False
        if self.end.at is None or self._answers.empty():
            return False
        answer, self._answers, self._asked = self._answers.get(), None, self._clock()
        commands = find_scheduler(job.scheduler).commands
        now_at = commands.parse_end(answer) if answer is not None else None
        if now_at is None or abs(now_at - self.end.at) <= _SAME_S:
            return False
        self.end = End(now_at, f"as {commands.state[0]} says")
        return True


def is_wish(job: CurrentJob, end: End, env: Mapping[str, str], came: float) -> bool:
    """Whether a SIGTERM that `came` at this time is the owner's wish: the walltime, a preemption, a failed node and a
    job that is queued again are not."""
    answer = ask_about(job.scheduler, job.id, env, _PATIENCE_S) if job.id else None
    commands = find_scheduler(job.scheduler).commands
    now_ends = commands.parse_end(answer) if answer is not None else None  # the walltime may have been changed
    ends = now_ends if now_ends is not None else end.at
    if ends is not None and came > ends - _EARLY_S:
        return False
    return answer is None or not commands.parse_taken(answer, env)


def is_ending(job: CurrentJob, env: Mapping[str, str]) -> bool:
    """Whether the scheduler says that it ends the job, or starts it again: then it signals the ranks itself."""
    answer = ask_about(job.scheduler, job.id, env, _PATIENCE_S)
    state = None if answer is None else read_job_state(job.scheduler, answer)
    return state not in {None, "gone", "running", "suspended"}


def is_waiting(scheduler: str, job: str, env: Mapping[str, str]) -> bool:
    """Whether this other job is still there; True if its scheduler does not say."""
    answer = ask_about(scheduler, job, env, _PATIENCE_S)
    state = None if answer is None else read_job_state(scheduler, answer)
    return state not in {"gone", "cancelled", "finished", "failed"}


def _script_start() -> int:
    """When this process started, which is when its job script did: the script became it."""
    ticks, now = start_time(os.getpid()), time.time()
    try:
        with open("/proc/uptime", encoding="ascii") as file:
            up = float(file.read().split()[0])
    except OSError:
        return int(now)
    return int(now - (up - int(ticks or 0) / os.sysconf("SC_CLK_TCK")))
