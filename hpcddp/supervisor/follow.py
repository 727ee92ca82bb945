"""The job that follows in a chain: queued before the ranks start, so that no kill breaks the chain, and cancelled when
nothing is left to do or the owner ends the chain."""

from __future__ import annotations

import _thread
import os
import re
import shlex
import time
from _queue import SimpleQueue  # queue would import threading, which costs a tenth of the start
from contextlib import suppress
from functools import partial

from hpcddp.errors import LaunchError, RequestError, SchedulerError
from hpcddp.processes import start_time
from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.runs.chain import find_follow_up, write_follow_up
from hpcddp.runs.stacks import pop_request, write_answer
from hpcddp.schedulers.registry import CurrentJob, find_current_job, find_scheduler
from hpcddp.schedulers.run import ask_job, ask_job_state, cancel_job, queue_job
from hpcddp.units import parse_walltime, read_number

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Mapping
    from typing import Any, TypeVar

    from hpcddp.runs.folder import AttemptFolder
    from hpcddp.schedulers.row import Commands
    from hpcddp.supervisor.reports import Reports

    T = TypeVar("T")
else:
    import _signal as signal


_PATIENCE_S = 10.0  # a scheduler that is busy must not hold up the job's start and end
#: A job that is signalled earlier than this before its end is not ended by its walltime.
_EARLY_S = 60
#: The source of an end that no scheduler gives.
BY_SCRIPT = "as the script says"
_ASK_AGAIN_S = 300.0
_SAME_S = 10  # schedulers round, and count from different moments
#: Seconds between two looks into the run folder: a shared file system shows a new file late anyway.
POLL_S = 3.0
_ANSWER_S = 5.0  # for the ranks' stacks
#: The signals with which an owner ends a job.
_ENDING = (signal.SIGTERM, signal.SIGINT)


def ask_in_thread(question: Callable[[], T]) -> SimpleQueue[T | None]:
    """Ask in a thread what may take a while, such as a scheduler. The queue gets the one answer, or None if the
    question has raised an error."""
    answers: SimpleQueue[T | None] = SimpleQueue()

    def ask() -> None:
        answer = None
        try:
            answer = question()
        finally:
            answers.put(answer)

    _thread.start_new_thread(ask, ())
    return answers


class EndTime(Record):
    """`at`: seconds since 1970; None: nothing ends the job. `source`: who says so."""

    at: int | None
    source: str

    def __str__(self) -> str:
        return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(self.at))} ({self.source})"


def find_job_of_script(scheduler: str, env: Mapping[str, str]) -> CurrentJob:
    """The job of a script for this scheduler, on this machine without an id. LaunchError where it runs in none."""
    row, job = find_scheduler(scheduler), find_current_job(env, scheduler)
    if row.this_machine:
        made = time.strftime("local-%Y%m%dT%H%M%S-") + str(os.getpid())
        return CurrentJob(scheduler, "", (job.name if job is not None else "") or made)
    if job is None or not job.id:
        raise LaunchError(
            f"{row.variables.job_id[0]} is not set: this is a job script for {row.title}",
            f"{row.commands.submit[0]} SCRIPT, or hpcddp launch -- COMMAND",
        )
    return job


def find_end(job: CurrentJob, env: Mapping[str, str], walltime_s: int | None, *, by_hand: bool) -> EndTime:
    """When the job ends: by the scheduler's variable, else by its command, else by the script's walltime. An end that
    is requested by hand, in an allocation, may come before the allocation's."""
    row = find_scheduler(job.scheduler)
    by_script = None if walltime_s is None else EndTime(int(_script_start()) + walltime_s, BY_SCRIPT)
    at = read_number(env.get(row.variables.end, "")) if row.variables.end else None
    if at is not None:
        end = EndTime(at, f"as {row.variables.end} says")
    elif job.id and (found := ask_job(job.scheduler, job.id, env)) is not None:
        end = EndTime(found.runs_until, _name_source(row.commands))
    else:
        end = EndTime(None, "")
    # `hpcddp launch` without a walltime asks for what is left of the allocation, which is no end of its own.
    if end.at is None:
        return by_script or end
    return by_script if by_hand and by_script is not None and (by_script.at or 0) < end.at - _SAME_S else end


def _script_start() -> float:
    """When the job's script started, in seconds since 1970. It loads its modules, and then becomes this process."""
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(start_time(os.getpid())) / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


def find_walltime(scheduler: str, script: str) -> int | None:
    """Read the walltime that the directives of the job's script request, if the scheduler does not answer. Seconds."""
    rule = find_scheduler(scheduler).directives
    if not rule.walltime or not script:
        return None
    with suppress(OSError, RequestError), open(script, errors="replace") as file:
        found = re.findall(rule.walltime, "".join(line for line in file if line.startswith(rule.prefix)))
        return parse_walltime(found[-1]) if found else None
    return None


class RepeatedQuestion:
    """A question that a thread asks every so many seconds, and not before the last answer: where a scheduler or a file
    system hangs, the supervisor still hears the ranks. `clock`: seconds, from anywhere."""

    def __init__(
        self,
        question: Callable[[], T],
        every_s: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        begins_in_s: float = 0.0,
    ) -> None:
        self._question, self._every_s, self._next, self._clock = question, every_s, clock() + begins_in_s, clock
        self._answers: SimpleQueue[T | None] | None = None

    def poll(self) -> Any:
        """The answer, if one has come since the last call, else None. Asks again when it is time."""
        answer = None
        if self._answers is not None:
            if self._answers.empty():
                return None
            answer, self._answers = self._answers.get(), None
        if self._clock() >= self._next:
            self._next = self._clock() + self._every_s
            self._answers = ask_in_thread(self._question)
        return answer


class MovingEnd:
    """The job's end, which its owner or an operator may move while it runs. `clock`: seconds, from anywhere."""

    def __init__(
        self, job: CurrentJob, end: EndTime, env: Mapping[str, str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.end = end
        self._commands = find_scheduler(job.scheduler).commands
        begins_in_s = _ASK_AGAIN_S if job.id and end.at is not None else float("inf")
        question = partial(ask_job, job.scheduler, job.id, env)
        self._question = RepeatedQuestion(question, _ASK_AGAIN_S, clock, begins_in_s=begins_in_s)

    def poll(self) -> bool:
        """Whether the end has moved, as far as the scheduler has answered; does not wait for it."""
        found = self._question.poll()
        now_at = found.runs_until if found is not None else None
        if now_at is None or self.end.at is None or abs(now_at - self.end.at) <= _SAME_S:
            return False
        self.end = EndTime(now_at, _name_source(self._commands))
        return True


def _name_source(commands: Commands) -> str:
    return f"as {(commands.state or commands.jobs)[0]} says"


def stop_on_request(request: str) -> None:
    """Send this process a SIGTERM if a person's request is there, a file in the run's folder, that the job saves and
    ends (`hpcddp cancel`): where the scheduler's own command would leave the ranks no time. Each counts once."""
    if os.path.exists(request):
        with suppress(OSError):
            os.unlink(request)
        os.kill(os.getpid(), signal.SIGTERM)


class StackRequests:
    """Asks the ranks for their stacks where a person does (`hpcddp stacks`), and writes their answers."""

    def __init__(self, attempt: AttemptFolder, reports: Reports, clock: Callable[[], float] = time.monotonic) -> None:
        self._attempt, self._reports, self._clock = attempt, reports, clock
        self._requests = RepeatedQuestion(lambda: pop_request(attempt), POLL_S, clock)
        self._until = 0.0

    def poll(self) -> None:
        now, answer = self._clock(), self._reports.stacks
        if answer is not None and (not answer.awaited or now >= self._until):
            self._reports.stacks = None
            ask_in_thread(lambda: write_answer(self._attempt, answer))
        elif answer is None and (name := self._requests.poll()):
            self._reports.ask_for_stacks(name)
            self._until = now + _ANSWER_S


def is_wish(job: CurrentJob, end: EndTime, env: Mapping[str, str], came: float) -> bool:
    """Whether a SIGTERM that `came` at this time is the owner's wish: the walltime, a preemption, a failed node and a
    job that is queued again are not."""
    found = ask_job(job.scheduler, job.id, env) if job.id else None
    now_ends = found.runs_until if found is not None else None  # the walltime may have been changed
    ends = now_ends if now_ends is not None else end.at
    if ends is not None and came > ends - _EARLY_S:
        return False
    return found is None or not found.is_taken


def is_ending(job: CurrentJob, env: Mapping[str, str]) -> bool:
    """Whether the scheduler says that it ends the job, or starts it again: then it signals the ranks itself."""
    state = ask_job_state(job.scheduler, job.id, env, _PATIENCE_S)
    return state not in {None, "gone", "running", "suspended"}


def is_queued(scheduler: str, job: str, env: Mapping[str, str]) -> bool:
    """Whether this other job is still there; True if its scheduler does not say."""
    state = ask_job_state(scheduler, job, env, _PATIENCE_S)
    return state not in {"gone", "cancelled", "finished", "failed"}


class FollowUp:
    """The follow-up of one job. `id`: as its scheduler printed it; None: there is none."""

    def __init__(self, job: CurrentJob, end: EndTime, env: Mapping[str, str], emit: Callable[[str], None]) -> None:
        self.id: str | None = None
        self._job = job
        self._end = end
        self._env = env
        self._emit = emit
        self._commands = find_scheduler(job.scheduler).commands
        self._deciding: SimpleQueue[None] | None = None

    def queue(self, attempt: AttemptFolder, options: tuple[str, ...]) -> None:
        """Queue it, and write its id into the attempt's folder; a job that was started again has done so already."""
        queued = find_follow_up(attempt)
        if queued is None or not is_queued(self._job.scheduler, queued, self._env):
            queued = self._submit(attempt.script, options)
        if queued is None:
            return
        self.id = queued
        try:
            write_follow_up(attempt, queued)
        except OSError as error:
            self.cancel(f"{attempt.next} cannot be written: {error.strerror}")
            return
        end = shlex.join([*self._commands.cancel, self._job.id])
        self._emit(f"job {queued} follows this one and resumes the run; to end both: {end}")

    def receive(self, number: int) -> None:
        """End the chain if the owner ends this job by this signal, which is found out in a thread."""
        is_decided = self._deciding is None or not self._deciding.empty()
        if number in _ENDING and self.id is not None and is_decided:
            came = time.time()
            self._deciding = ask_in_thread(lambda: self._end_chain(came))

    def wait(self) -> None:
        if self._deciding is not None:
            self._deciding.get()
            self._deciding = None

    def cancel(self, why: str) -> None:
        """Take it back, if there is one. If that fails, it will see by itself that nothing is left to do."""
        self.wait()
        self._cancel(why)

    def is_queued(self) -> bool:
        self.wait()
        return self.id is not None and is_queued(self._job.scheduler, self.id, self._env)

    def _end_chain(self, came: float) -> None:
        if is_wish(self._job, self._end, self._env, came):
            self._cancel("somebody ends this job long before its end, and with it the chain")

    def _cancel(self, why: str) -> None:
        if self.id is None:
            return
        done = not cancel_job(self._job.scheduler, self.id, self._env)
        by_hand = f"{self.id} is still queued; to take it back: {shlex.join([*self._commands.cancel, self.id])}"
        self._emit(f"{why}: {f'{self.id} is cancelled' if done else by_hand}")
        self.id = None

    def _submit(self, script: str, options: tuple[str, ...]) -> str | None:
        words = list[str]()
        for word in self._commands.follow:
            filled = word.replace("{job}", self._job.id).replace("{script}", script)
            words += options if word == "{options}" else [filled]
        folder = self._env.get(find_scheduler(self._job.scheduler).variables.folder) or os.getcwd()
        why = "there is no copy of this script"
        if os.path.isfile(script):
            try:
                return queue_job(self._job.scheduler, words, self._env, folder)
            except SchedulerError as error:
                why = error.message
        self._emit(f"the next attempt is not queued: {why}\nhint: on a login node: cd {folder} && {shlex.join(words)}")
        return None
