"""Whether an attempt of a chain may start: by what the jobs before left in the run folder, never by their exit status.

It starts unless a run has failed, nothing is left, or there was no progress since the start before.
"""

from __future__ import annotations

import os
from contextlib import suppress

from hpcddp.errors import LaunchError
from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.runs.folder import AttemptFolder, RunFolder, job_of, list_attempts, start_of
from hpcddp.runs.jsonfile import read_first_line, read_record, write_object
from hpcddp.runs.lock import read_holds
from hpcddp.runs.state import RunState, correct_killed, read_state, replace_state
from hpcddp.schedulers.job_id import parse_id

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


def record_opened(attempt: AttemptFolder, run: RunFolder) -> None:
    """Record that the ranks of this attempt have named a folder that is not the job's, if that can be written."""
    with suppress(OSError), open(attempt.opened, "a", encoding="utf-8", errors="surrogateescape") as file:
        file.write(f"{os.path.abspath(run.path)}\n")


def list_opened(attempt: AttemptFolder) -> list[RunFolder]:
    """The folders that the ranks of this attempt have named, in order."""
    with suppress(OSError), open(attempt.opened, encoding="utf-8", errors="surrogateescape") as file:
        return [RunFolder(path) for path in dict.fromkeys(file.read().splitlines())]
    return []


def list_job_runs(attempt: AttemptFolder) -> list[RunFolder]:
    """The runs that this attempt's job and the jobs before it in its chain have opened. RequestError."""
    jobs = [job_of(attempt.name)]
    while (before := find_before(attempt.run.attempt(jobs[0]))) and job_of(before.attempt) not in jobs:
        jobs.insert(0, job_of(before.attempt))
    names = [attempt.name, *(one.name for one in list_attempts(attempt.run))]
    starts = [(jobs.index(job_of(name)), start_of(name, job_of(name)), name) for name in names if job_of(name) in jobs]
    found = [run for *_, name in sorted(starts) for run in list_opened(attempt.run.attempt(name))]
    return list(dict.fromkeys(found))


def find_unfinished_runs(attempt: AttemptFolder) -> list[tuple[RunFolder, RunState]]:
    """The runs that the ranks of this attempt's job have named and left unfinished. None where one has failed in this
    attempt. The errors of `read_state`."""
    states = [(run, state) for run in (attempt.run, *list_job_runs(attempt)) if (state := read_state(run)) is not None]
    if any((state.status, state.attempt) == ("failed", attempt.name) for _, state in states):
        return []
    left = [(run, state) for run, state in states if state.status == "unfinished" and run != attempt.run]
    return [(run, correct_killed(run, state)) for run, state in left]


def find_stop(attempt: AttemptFolder, reasons: Collection[str]) -> tuple[RunFolder, RunState] | None:
    """The run in which ranks of this attempt have stopped for one of these reasons. The errors of `read_state`."""
    for run in (attempt.run, *list_opened(attempt)):
        state = read_state(run)
        if state is not None and is_unfinished(state, attempt.name) and state.ended and state.reason in reasons:
            return run, state
    return None


class Link(Record):
    """`chain.json`: an attempt, its number in the chain (from 1), the step of its runs when it began, and the most
    attempts."""

    attempt: str
    turn: int
    step: int
    of: int = 0

    @property
    def left(self) -> int:
        return max(self.of - self.turn, 0)


class StartDecision(Record):
    """`reason`: why the attempt does not start; "": it does. `is_failure`: no later attempt will resume the run."""

    reason: str = ""
    is_failure: bool = False


def decide_start(states: Sequence[RunState], since: Link | None, *, again: bool, ended_well: bool) -> StartDecision:
    """Whether the next attempt may start. `states`: of the job's run and those that its ranks have named. `since`: the
    start before, by the job before or, `again`, by this one; None: the first of its chain. `ended_well`: its program
    has ended with 0; one that was ended behind its training comes to the rest of it again."""
    if since is None:
        return StartDecision()
    step = sum(one.step for one in states)
    for one in states:
        if one.status == "failed" and (not again or job_of(one.attempt) == job_of(since.attempt)):
            return StartDecision(f"attempt {one.attempt} failed at step {one.step}: {one.reason}", True)
    is_finished = _are_finished(states)
    if is_finished and ended_well:
        return StartDecision(f"attempt {states[0].attempt} has finished the run at step {step}")
    if again or step > since.step:
        return StartDecision()
    if is_finished:
        return StartDecision(f"no step is left, and attempt {since.attempt} did not end well after that", True)
    if not states:
        return StartDecision(f"attempt {since.attempt} ended before its first checkpoint", True)
    return StartDecision(f"no progress: attempt {since.attempt} began and ended at step {step}", True)


def _are_finished(states: Sequence[RunState]) -> bool:
    return bool(states) and all(one.status == "finished" for one in states)


def start_attempt(attempt: AttemptFolder, most: int) -> tuple[StartDecision, Link]:
    """Decide about this attempt, of at most `most`, and record the decision in its chain.json or in state.json.
    RequestError if what the attempts left cannot be read; LaunchError if the run folder cannot be written."""
    try:
        states = [state for run in (attempt.run, *list_job_runs(attempt)) if (state := read_state(run)) is not None]
        again = next(filter(None, map(read_link, reversed(_earlier_starts(attempt)))), None)
        since = again or find_before(attempt)
        ends = [hold.end for hold in read_holds(attempt.run) if hold.holder.attempt != attempt.name]
        ended_well = bool(ends) and ends[-1] is not None and ends[-1].status == 0
        decision = decide_start(states, since, again=again is not None, ended_well=ended_well)
        turn = 1 if since is None else since.turn + (again is None)
        link = Link(attempt.name, turn, sum(one.step for one in states), most)
        if not decision.reason:
            write_object(attempt.chain, link._asdict())
        elif decision.is_failure and not _are_finished(states):
            last = read_state(attempt.run) or RunState("failed", 0, 0, "", attempt.name)
            reason = f"the chain stopped: {decision.reason}"
            replace_state(attempt.run, last._replace(status="failed", reason=reason, attempt=attempt.name))
    except OSError as error:
        raise LaunchError(
            f"the run folder {attempt.run.path} cannot be used: {(error.strerror or str(error)).lower()}",
            f"ls -ld {attempt.run.path} {attempt.path}",
        ) from error
    return decision, link


def is_unfinished(state: RunState | None, attempt: str | None) -> bool:
    """Whether this attempt wrote that there is more to do. A program that writes no state is finished."""
    return state is not None and state.attempt == attempt and state.status == "unfinished"


def find_before(attempt: AttemptFolder) -> Link | None:
    """The attempt that queued this one. RequestError if what the attempts left cannot be read."""
    job = job_of(attempt.name)
    others = (one for one in list_attempts(attempt.run) if job_of(one.name) != job)
    queued = (one for one in others if parse_id(read_first_line(one.next)).is_same(parse_id(job)))
    links = list(filter(None, map(read_link, queued)))
    if not links:
        return None
    # a job that was started again made several attempts: progress counts from the first one's step
    last = max(links, key=lambda link: start_of(link.attempt, job_of(link.attempt)))
    return last._replace(step=min(link.step for link in links))


def find_follow_up(attempt: AttemptFolder) -> str | None:
    """The follow-up that an earlier start of this attempt's job has queued; None if there is none."""
    return next(filter(None, (read_first_line(other.next) for other in reversed(_earlier_starts(attempt)))), None)


def write_follow_up(attempt: AttemptFolder, job: str) -> None:
    """Record the job that this attempt's job has queued, by the id that its scheduler printed. OSError."""
    with open(attempt.next, "w", encoding="utf-8") as file:
        file.write(f"{job}\n")


def _earlier_starts(attempt: AttemptFolder) -> list[AttemptFolder]:
    job = job_of(attempt.name)
    return [attempt.run.attempt(f"{job}.{number}") for number in range(1, start_of(attempt.name, job))]


def read_link(attempt: AttemptFolder) -> Link | None:
    """None: the attempt is none of a chain. DamagedFileError; SchemaError if another hpcddp wrote the file."""
    return read_record(attempt.chain, Link)
