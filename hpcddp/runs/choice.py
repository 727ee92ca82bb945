"""Which run an attempt belongs to: the one place where runs are named, numbered, resumed or begun.

Runs of one name are `train`, `train-2`, `train-3`, …. The first of these rules that fits chooses:

1. A job that was started again, and a job of a chain, stay in their run. A job that `hpcddp submit` made a run for gets
   that one, if nobody has held it. So does a script of a job that chooses its runs itself: each start opens the run
   of a name that the starts before it have begun, if it is the only one; several are refused, unless it names one,
   and a finished one is not opened by other arguments.
2. `--resume RUN` resumes that run, whatever its command and state. One that an earlier start of a job has finished
   makes no more steps in the next one.
3. `--fresh` begins a new run, with the next number.
4. The newest run of the same command is resumed, unless it is finished.
5. Else a new run begins, with the next number.

An index of a job array has a name of its own: `train.7`, `train.7-2`.
"""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from functools import partial

from hpcddp.errors import RequestError
from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.runs.chain import find_before
from hpcddp.runs.command import identify_program, leave_out_start
from hpcddp.runs.folder import (
    RunFolder,
    list_checkpoints,
    list_holders,
    list_run_folders,
    list_runs,
    number_attempt,
    show_path,
    step_of,
)
from hpcddp.runs.jsonfile import DamagedFileError
from hpcddp.runs.lock import HeldError, describe_process, find_live_holder, find_owner, read_holders, take_run
from hpcddp.runs.state import check_attempt, read_finish, read_state
from hpcddp.schedulers.registry import find_current_job

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpcddp.runs.chain import Link
    from hpcddp.runs.folder import AttemptFolder
    from hpcddp.runs.lock import Holder


# Runs that a script of a job opens itself: which one of those that it has begun before it means now.


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


_SHOWN_RUNS = 12


class Spelling(Record):
    """What a person writes to ask for a run, for messages: options, or arguments of `hpcddp.runtime`."""

    fresh: str = "--fresh"
    resume: str = "--resume"
    named: str = "--resume {}"  # to resume the run of that name
    own: str = "--fresh, or --name X"  # for a run of its own, where another job holds this one


class Asked(Record):
    """What is asked for. `base`: the folder of the first run of this name. `command`: empty if it is not known."""

    base: str
    command: tuple[str, ...] = ()
    fresh: bool = False
    resume: str | None = None  # a run's name, or its path
    spelling: Spelling = Spelling()
    made: str = ""  # the name of the run that `hpcddp submit` made for this job

    def of_index(self, index: str) -> Asked:
        """The same for one index of a job array."""
        return self._replace(base=f"{self.base}.{index}") if index else self


class Origin(Record):
    """The job that starts an attempt. `by_hand`: one of several starts in one job, such as `hpcddp launch`. `within`,
    `restart`: of a script that chooses its runs itself, as in `Holder`; so is `job_start`. `earlier`: the attempts of
    its job and chain that came before this one, and have ended."""

    attempt: str = ""
    scheduler: str = ""
    job: str = ""
    by_hand: bool = False
    within: str = ""
    restart: int = 0
    job_start: str = ""
    earlier: tuple[str, ...] = ()


class RunChoice(Record):
    """The run, whether it is new, and why. `before`: the attempt that has held it, if this one follows that in a chain
    or job. `attempt`: the name of this one, once it holds the run. `over`: why the run ended, of one that this job has
    finished before. `is_same`: whether the job began it for this command; else it may be another training's."""

    run: RunFolder
    is_new: bool
    why: str
    other: str  # how to get another run than this one
    before: str | None = None
    attempt: str = ""
    over: str = ""
    is_same: bool = True

    def __str__(self) -> str:
        name = f"run {show_path(self.run.path)}"
        if self.over:
            return f"{name}: finished by an earlier start of this job; no step is left"
        if self.is_new:
            return f"{name}: new{self.why}{self.other}"
        checkpoints = list_checkpoints(self.run.checkpoints)
        step = f"resumed from step {step_of(checkpoints[-1])}" if checkpoints else "again; it has no checkpoint yet"
        return f"{name}: {step}{self.why}{self.other}"


def choose_run(asked: Asked, origin: Origin) -> RunChoice:
    """The run that the rules of this module give. Reads, and writes nothing.

    RequestError if `--resume` names no run or stands beside `--fresh`, or if a file or folder that decides cannot be
    read; SchemaError if another hpcddp wrote a run.
    """
    check_asked(asked)
    there = list_runs(asked.base)
    known = [(number, run) for number, run in there if is_run(run)]
    runs = [run for _, run in known if not os.path.exists(run.sweep)]
    for run in reversed(runs):
        before = _find_before(run, origin)
        if before is not None:
            return RunChoice(run, False, "", "", before.attempt)
    for run in runs:  # of several scripts each comes back to its own, in their order
        if _began_in(run, origin, asked.command):
            return RunChoice(run, False, "", "")
    begun = find_begun(asked, origin, runs) if origin.within and asked.resume is None else None
    if begun is not None:
        held = read_holders(begun)
        ended = held[-1].attempt if held[-1].attempt in origin.earlier else None
        finish = read_finish(begun)
        over = finish.reason if finish is not None else ""
        return RunChoice(begun, False, "", "", ended, over=over, is_same=is_for(held, asked, origin))
    made = next((run for run in runs if os.path.basename(run.path) == asked.made), None)
    if made is not None and not list_holders(made):
        return RunChoice(made, True, "", "")
    if asked.resume is not None:
        named = _named_run(asked, asked.resume, runs)
        over = _find_finish(named, origin)
        return RunChoice(named, False, f", as {asked.spelling.resume} asks", "", over=over)
    same = next((run for run in reversed(runs) if _is_same(find_command(run), asked.command)), None)
    if same is not None and not asked.fresh:
        state = read_state(same)
        if state is None or state.status != "finished":
            check_only(same, asked, origin, runs)
            return RunChoice(same, False, "", f" (a new run instead: {asked.spelling.fresh})")
    last = max((number for number, _ in there), default=0) if known else 0
    new = RunFolder(asked.base if last == 0 else f"{asked.base}-{last + 1}")
    return RunChoice(new, True, *_why_new(asked, same, runs))


def check_asked(asked: Asked) -> None:
    """RequestError for two options that contradict each other."""
    if asked.fresh and asked.resume is not None:
        raise RequestError(
            f"--fresh begins a new run, and --resume {asked.resume} resumes an old one", "keep one of the two"
        )


def is_run(run: RunFolder) -> bool:
    """Whether an attempt has been in this folder."""
    marks = (run.about, run.plan, run.state, run.holders, run.attempts, run.checkpoints, run.submitted, run.sweep)
    return any(os.path.exists(mark) for mark in marks)


def find_command(run: RunFolder) -> tuple[str, ...] | None:
    """The command that the run belongs to; None if no holder says so."""
    owner = find_owner(run)
    return owner.command if owner is not None else None


def _is_same(known: Sequence[str] | None, asked: tuple[str, ...]) -> bool:
    """A command that is not known is taken for the same: the name alone decides."""
    return not known or not asked or tuple(known) == asked


def _is_left(run: RunFolder, command: tuple[str, ...]) -> bool:
    """Whether an older run of this command was not finished."""
    with suppress(DamagedFileError):
        if _is_same(find_command(run), command):
            state = read_state(run)
            return state is None or state.status != "finished"
    return False


def _find_before(run: RunFolder, origin: Origin) -> Link | None:
    return find_before(run.attempt(origin.attempt)) if origin.job and not origin.by_hand else None


def _began_in(run: RunFolder, origin: Origin, command: tuple[str, ...]) -> bool:
    """Whether an earlier start of this job has held the run for this command: the scheduler started the job again. In
    one start, scripts may run one after the other, or side by side."""
    if not origin.job or origin.by_hand:
        return False
    held = [one for one in read_holders(run) if (one.scheduler, one.job) == (origin.scheduler, origin.job)]
    if not held or not _is_same(held[-1].command, command):
        return False
    return not held[-1].job_start or held[-1].job_start != origin.job_start


def _named_run(asked: Asked, name: str, runs: Sequence[RunFolder]) -> RunFolder:
    path = name if "/" in name else os.path.join(os.path.dirname(asked.base), name)
    path = os.path.normpath(os.path.join(os.getcwd(), path)) if os.path.isabs(asked.base) else path
    if not is_run(RunFolder(path)):
        beside = [run.path for run in runs] or list_run_folders(os.path.dirname(asked.base) or ".")
        known = [os.path.basename(path) for path in beside]
        more = f", … ({len(known)} in all)" if len(known) > _SHOWN_RUNS else ""
        hint = f"one of: {', '.join(known[:_SHOWN_RUNS])}{more}" if known else f"leave out {asked.spelling.resume}"
        raise RequestError(f"{asked.spelling.named.format(name)}: there is no run {path}", hint)
    return RunFolder(path)


def _find_finish(run: RunFolder, origin: Origin) -> str:
    """Why an earlier start of this job has finished the run; "" if none has, or a damaged state cannot say it."""
    with suppress(DamagedFileError):
        finish = read_finish(run)
        if finish is not None and finish.attempt in origin.earlier:
            return finish.reason
    return ""


def _why_new(asked: Asked, same: RunFolder | None, runs: Sequence[RunFolder]) -> tuple[str, str]:
    """Why a new run begins, and how to get the old one."""
    if not runs:
        return "", ""
    old = os.path.basename((same or runs[-1]).path)
    to_resume = f" (to resume that one: {asked.spelling.named.format(old)})"
    if asked.fresh:
        return f", as {asked.spelling.fresh} asks", to_resume.replace("that one", old)
    if same is not None:
        left = next((run for run in reversed(runs) if run is not same and _is_left(run, asked.command)), None)
        if left is not None:
            name = os.path.basename(left.path)
            to_resume = f" ({name} is not: {asked.spelling.named.format(name)})"
        return f", since {old} is finished", to_resume
    command = shlex.join(find_command(runs[-1]) or ())
    return f", since {old} was started with another command, {command}", to_resume


# The start of an attempt: its run is chosen, and taken so that no other job writes it.


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
