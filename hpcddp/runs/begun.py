"""Runs that a script of a job opens itself: which one of those that it has begun before it means now."""

from __future__ import annotations

import os

from hpcddp.errors import RequestError
from hpcddp.record import TYPE_CHECKING
from hpcddp.runs.command import identify_program, leave_out_start
from hpcddp.runs.lock import read_holders
from hpcddp.runs.state import read_finish

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpcddp.runs.choice import Asked, Origin
    from hpcddp.runs.folder import RunFolder
    from hpcddp.runs.holder import Holder


def find_begun(asked: Asked, origin: Origin, runs: Sequence[RunFolder]) -> RunFolder | None:
    """The run that earlier starts of this job have begun for the same program, if this start has not opened it yet.
    Arguments choose among several runs. They may differ between starts in any way, but for a finished run in what
    `leave_out_start` leaves out only: a script that skips its finished folds has come to another one.

    RequestError where nothing chooses: such a script opens several runs in another order.
    """
    opened = [(run, [one for one in read_holders(run) if one.within == origin.within]) for run in runs]
    program = identify_program(asked.command)
    begun = [
        (run, held)
        for run, held in opened
        if held and not _is_of_this_start(held[0], origin) and identify_program(held[0].command) == program
    ]
    same = [(run, held) for run, held in begun if is_for(held, asked, origin)]
    if not same and all(read_finish(run) is not None for run, _ in begun):
        return None
    begun = same or begun
    left = [run for run, held in begun if not _is_of_this_start(held[-1], origin)]
    if left and len(begun) > 1:
        raise _of_several("earlier starts of this job have", [run for run, _ in begun], "")
    return left[0] if left else None


def check_only(run: RunFolder, asked: Asked, origin: Origin, runs: Sequence[RunFolder]) -> None:
    """RequestError if the script of the job that held the run last has opened others under this name: its first
    training, which asks now, may be that of another one."""
    last = read_holders(run)[-1:]
    if not last or not last[0].within or last[0].within == origin.within:
        return
    beside = [one for one in runs if one is not run and _opened_by(one, last[0])]
    if beside:
        opened = [one for one in runs if one is run or one in beside]
        job = f"job {last[0].job} has" if last[0].job else "the job before has"
        raise _of_several(job, opened, f"; or {asked.spelling.named.format(os.path.basename(run.path))}")


def _opened_by(run: RunFolder, one: Holder) -> bool:
    """Whether the job of this holder has opened the run, too, for the same command."""
    words = _settle(one)
    return any(held.within == one.within and _settle(held) == words for held in read_holders(run))


def _of_several(who: str, begun: Sequence[RunFolder], or_named: str) -> RequestError:
    names = ", ".join(os.path.basename(run.path) for run in begun)
    return RequestError(
        f"{who} begun {len(begun)} runs of one run_dir, {names}, and nothing says which one the script means now: the"
        " weights might be those of another training",
        f'give each training a run_dir of its own, such as run_dir=f"runs/fold{{k}}"{or_named}',
    )


def is_for(held: Sequence[Holder], asked: Asked, origin: Origin) -> bool:
    """Whether the job of one of these holders of a run, which is the origin's, has opened it for this command."""
    words = leave_out_start(asked.command, origin.attempt, origin.job)
    mine = [one for one in held if one.within == origin.within]
    return any(one.command == asked.command or _settle(one) == words for one in mine)


def _settle(one: Holder) -> tuple[str, ...]:
    return leave_out_start(one.command, one.attempt, one.job)


def _is_of_this_start(one: Holder, origin: Origin) -> bool:
    """Whether a run that this job has opened was held by its present start; the others came before it."""
    return (one.attempt, one.restart) == (origin.attempt, origin.restart)
