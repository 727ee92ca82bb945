"""Whether an attempt of a chain may start: by what the attempt before left in the run folder, never by its exit status.

An attempt that is killed cannot report at its end, so the attempt after it decides. It starts only if the ranks wrote
that there is more to do, at a later step than the one where they had begun. Otherwise a run that
repeats the same step would be queued without end.
"""

from __future__ import annotations

import os
from contextlib import suppress

from hpcddp.errors import LaunchError
from hpcddp.record import Record
from hpcddp.runs.folder import AttemptFolder, RunFolder, job_of, list_attempts, list_holders, start_of
from hpcddp.runs.jsonfile import DamagedFileError, read_line, read_object, read_record, write_object
from hpcddp.runs.lock import read_end, read_holder, read_holders
from hpcddp.runs.state import State, correct_killed, read_state, replace_state
from hpcddp.schedulers.job_id import parse_id

# Runs that the script of a job has opened itself, beside the job's own.


def note_own_run(attempt: AttemptFolder, run: RunFolder) -> None:
    """The script of this attempt has opened a run that is not the job's. What cannot be written is not known."""
    with suppress(OSError), open(_list(attempt), "a", encoding="utf-8", errors="surrogateescape") as file:
        file.write(f"{os.path.abspath(run.path)}\n")


def list_own_runs(attempt: AttemptFolder) -> list[RunFolder]:
    """In the order in which they were opened."""
    with suppress(OSError), open(_list(attempt), encoding="utf-8", errors="surrogateescape") as file:
        return [RunFolder(path) for path in dict.fromkeys(file.read().splitlines())]
    return []


def read_own_states(run: RunFolder) -> list[tuple[RunFolder, State]]:
    """What the ranks wrote last of each run that scripts have opened in any attempt of the job's run. The errors of
    `read_state`."""
    own = dict.fromkeys(one for attempt in list_attempts(run) for one in list_own_runs(attempt))
    return [(one, state) for one in own if (state := read_state(one)) is not None]


def _list(attempt: AttemptFolder) -> str:
    return os.path.join(attempt.path, "own-runs")


class Turn(Record):
    """`chain.json`: which attempt of its chain it was (from 1), of how many at most, and from which step."""

    turn: int
    step: int
    of: int = 0


class Link(Record):
    """One attempt of a chain: its name, which one it is (from 1), and the run's step when it began, to which those of
    the runs that its script has opened itself are added."""

    attempt: str
    turn: int
    step: int


class StartDecision(Record):
    """`starts`, or why not; `is_failure`: the run is not finished, and no later attempt will resume it."""

    starts: bool
    reason: str = ""
    is_failure: bool = False


class Started(Record):
    """What `start_attempt` decided; of an attempt that starts, which one it is, and how many may follow. `of_several`:
    the link's step is of several runs together."""

    decision: StartDecision
    link: Link
    left: int
    of_several: bool = False


def decide_start(state: State | None, before: Link | None, *, ended_well: bool = True) -> StartDecision:
    """Whether the next attempt may start. `state`: what state.json holds; no `before`: the first of its chain.
    `ended_well`: of the job before; a program that was ended behind its training comes to the rest of it again."""
    if before is None:
        return StartDecision(True)
    if state is None or job_of(state.attempt) != job_of(before.attempt):
        return StartDecision(False, f"attempt {before.attempt} ended before its first checkpoint", True)
    if state.status == "finished" and ended_well:
        return StartDecision(False, f"attempt {before.attempt} has finished the run at step {state.step}")
    if state.status == "finished" and state.step <= before.step:
        return StartDecision(False, f"no step is left, and attempt {before.attempt} did not end well after that", True)
    if state.status == "finished":
        return StartDecision(True)
    if state.status != "unfinished":
        return StartDecision(False, f"attempt {before.attempt} failed at step {state.step}: {state.reason}", True)
    if state.step <= before.step:
        return StartDecision(False, f"no progress: attempt {before.attempt} began and ended at step {state.step}", True)
    return StartDecision(True)


def decide_restart(state: State | None, again: Link, *, ended_well: bool = True) -> StartDecision:
    """Whether a job of a chain that its scheduler starts again may start. That it made no progress is no reason."""
    is_over = state is not None and (state.status == "failed" or (state.status == "finished" and ended_well))
    if state is not None and state.attempt == again.attempt and is_over:
        return decide_start(state, again)
    return StartDecision(True)


def start_attempt(attempt: AttemptFolder, most: int) -> Started:
    """Decide about this attempt, of at most `most`, and record the decision in its chain.json or in state.json.

    Before anything is written: SchemaError if another hpcddp wrote a file that it reads or replaces (a requeued
    attempt has a chain.json already), RequestError if state.json or what the attempts left cannot be read. LaunchError
    if the run folder cannot be written.
    """
    state = read_state(attempt.run)
    with suppress(DamagedFileError):
        read_object(attempt.chain)
    try:
        again = _find_earlier_start(attempt)
        before = None if again else find_before(attempt)
        if before is not None and state is not None and _came_later(attempt.run, state.attempt, before.attempt):
            before = before._replace(attempt=state.attempt)  # a job of no chain, while this one waited
        since = again or before
        whole, step, of_several = _add_own_runs(attempt.run, state, since)
        well = since is None or _has_ended_well(attempt, job_of(since.attempt))
        decision = (
            decide_restart(whole, again, ended_well=well) if again else decide_start(whole, before, ended_well=well)
        )
        turn = again.turn if again else before.turn + 1 if before else 1
        link = Link(attempt.name, turn, step)
        if decision.starts:
            write_object(attempt.chain, Turn(link.turn, step, most)._asdict())
        elif decision.is_failure and (whole is None or whole.status != "finished"):
            last = state or State("failed", 0, 0, "", attempt.name)
            reason = f"the chain stopped: {decision.reason}"
            replace_state(attempt.run, last._replace(status="failed", reason=reason, attempt=attempt.name))
    except OSError as error:
        raise LaunchError(
            f"the run folder {attempt.run.path} cannot be used: {(error.strerror or str(error)).lower()}",
            f"ls -ld {attempt.run.path} {attempt.path}",
        ) from error
    return Started(decision, link, max(most - link.turn, 0), of_several)


def _add_own_runs(run: RunFolder, state: State | None, since: Link | None) -> tuple[State | None, int, bool]:
    """The state of the job's run and of those that its script has opened itself together, their steps, and whether
    there are such runs. `since`: what was written before this attempt's job says nothing."""
    own = [one for _, one in read_own_states(run)]
    step = sum(one.step for one in [*own, *([state] if state is not None else [])])
    if not own or since is None:
        return state, step, bool(own)
    held = [holder.attempt for holder in read_holders(run)]
    first = next((at for at, name in enumerate(held) if start_of(name, job_of(since.attempt))), len(held))
    states = [one for one in (state, *own) if one is not None and one.attempt in held[first:]]
    if not states:
        return state, step, True
    found = min(states, key=lambda one: ("unfinished", "failed", "finished").index(one.status))
    if state is not None and state.attempt in held[first:] and state.status != "finished":
        found = state  # the job's own run decides
    return found._replace(step=step, attempt=since.attempt), step, True


def _has_ended_well(attempt: AttemptFolder, job: str) -> bool:
    """Whether the last start of this job, before the attempt, wrote that it ended with status 0."""
    holders = ((path, read_holder(path)) for path in list_holders(attempt.run))
    names = [(path, one.attempt) for path, one in holders if one is not None and one.attempt != attempt.name]
    ends = [read_end(path) for path, name in names if start_of(name, job)]
    return not ends or (ends[-1] is not None and ends[-1].status == 0)


def _came_later(run: RunFolder, attempt: str, before: str) -> bool:
    """Whether the first of these attempts held the run after the other one."""
    held = [holder.attempt for holder in read_holders(run)]
    return attempt in held and before in held and held.index(attempt) > held.index(before)


def is_unfinished(state: State | None, attempt: str | None) -> bool:
    """Whether this attempt wrote that there is more to do. A program that writes no state is finished."""
    return state is not None and state.attempt == attempt and state.status == "unfinished"


def find_before(attempt: AttemptFolder) -> Link | None:
    """The attempt that queued this one: it wrote down the id that its scheduler gave.

    RequestError if what the attempts left cannot be read.
    """
    job = job_of(attempt.name)
    others = (one for one in list_attempts(attempt.run) if job_of(one.name) != job)
    queued = (one for one in others if parse_id(read_line(one.next)).is_same(parse_id(job)))
    links = list(filter(None, map(_find_link, queued)))
    if not links:
        return None
    # a job that was started again made several attempts: progress counts from the first one's step
    last = max(links, key=lambda link: start_of(link.attempt, job_of(link.attempt)))
    return last._replace(step=min(link.step for link in links))


def find_follow_up(attempt: AttemptFolder) -> str | None:
    """The follow-up that an earlier start of this attempt's job has queued; None if there is none."""
    for other in reversed(_earlier_starts(attempt)):
        if queued := read_line(other.next):
            return queued
    return None


def write_follow_up(attempt: AttemptFolder, job: str) -> None:
    """This attempt's job has queued that one, by the id that its scheduler printed. OSError if it cannot be written."""
    with open(attempt.next, "w", encoding="utf-8") as file:
        file.write(f"{job}\n")


def _find_earlier_start(attempt: AttemptFolder) -> Link | None:
    """The link that the last earlier start of this attempt's job was, if it was one."""
    links = list(filter(None, map(_find_link, _earlier_starts(attempt))))
    return links[-1] if links else None


def _earlier_starts(attempt: AttemptFolder) -> list[AttemptFolder]:
    job = job_of(attempt.name)
    mine = start_of(attempt.name, job)
    found = [one for one in list_attempts(attempt.run) if 0 < start_of(one.name, job) < mine]
    return sorted(found, key=lambda one: start_of(one.name, job))


def _find_link(attempt: AttemptFolder) -> Link | None:
    begun = read_record(attempt.chain, Turn, "; to begin a new chain submit the job again")
    return None if begun is None else Link(attempt.name, begun.turn, begun.step)


# The starts of one job: those that its supervisor made, its scheduler, and the jobs before it in a chain.


def list_starts(attempt: AttemptFolder) -> list[AttemptFolder]:
    """Up to this one, the first one first; none if no supervisor began this one.

    `hpcddp launch` that is typed again in one allocation, after the one before it has ended, is no start of that one's
    job. RequestError if a folder cannot be read; SchemaError if another hpcddp wrote a holder.
    """
    job, earlier, starts = job_of(attempt.name), set[str](), list[str]()
    for path in list_holders(attempt.run):
        holder = read_holder(path)
        if holder is None:
            continue
        if not start_of(holder.attempt, job):
            if not starts:
                earlier.add(holder.attempt)
            continue
        starts.append(holder.attempt)
        if holder.attempt == attempt.name:
            found = [attempt.run.attempt(name) for name in starts]
            before = find_before(found[0])
            if before is None or before.attempt not in earlier:  # the scheduler may have begun its ids anew
                return found
            return [*list_starts(attempt.run.attempt(before.attempt)), *found]
        if holder.by_hand and read_end(path) is not None:
            starts.clear()
    return []


def opens_own_runs(attempt: AttemptFolder) -> bool:
    """Whether the script of this attempt's job has opened runs itself, in any start. The errors of `list_starts`."""
    return any(list_own_runs(one) for one in list_starts(attempt) or [attempt])


def find_left(attempt: AttemptFolder, state: State | None, status: int) -> list[tuple[RunFolder, State]]:
    """The runs that the script of this attempt's job has opened itself and left unfinished. `state`: of the job's run.
    `status`: with which the attempt has ended; where a run has failed with it, none of them is to be continued.

    All starts count: a run that one of them has lost, and the next one has not come to, is left, too. The errors of
    `read_state` and `list_starts`.
    """
    own = read_own_states(attempt.run)
    states = [one for one in (state, *(one for _, one in own)) if one is not None]
    if not own or (status and any((one.status, one.attempt) == ("failed", attempt.name) for one in states)):
        return []
    starts = {one.name for one in list_starts(attempt)} or {attempt.name}
    left = [(run, one) for run, one in own if one.status == "unfinished" and one.attempt in starts]
    return [(run, correct_killed(run, one, lambda: False)) for run, one in left]
