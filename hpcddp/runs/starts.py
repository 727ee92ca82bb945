"""The starts of one job: those that its supervisor made, its scheduler, and the jobs before it in a chain."""

from __future__ import annotations

from hpcddp.record import TYPE_CHECKING
from hpcddp.runs.chain import find_before
from hpcddp.runs.folder import job_of, list_holders, start_of
from hpcddp.runs.lock import read_end, read_holder
from hpcddp.runs.own_runs import list_own_runs, read_own_states
from hpcddp.runs.state import correct_killed

if TYPE_CHECKING:
    from hpcddp.runs.folder import AttemptFolder, RunFolder
    from hpcddp.runs.state import State


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
