"""A start of a run: what is in its folder says what is left to do.

`--fresh` sets the folder aside, once: what is typed is a stamp, which the run that begins records, so that a later
start by the same words, such as a requeue, resumes that run.
"""

from __future__ import annotations

import os
import re
import sys
import time
from contextlib import contextmanager, suppress
from functools import partial

from hpcddp.errors import RequestError
from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.runs.command import identify_program
from hpcddp.runs.folder import (
    RunFolder,
    cannot_write,
    list_checkpoints,
    list_numbered,
    list_run_folders,
    number_attempt,
    show_path,
    step_of,
)
from hpcddp.runs.jsonfile import DamagedFileError, format_now, read_record, write_object
from hpcddp.runs.lock import describe_process, release_run, take_run
from hpcddp.runs.state import RunState, check_run_folder, read_state
from hpcddp.schedulers.registry import find_current_job
from hpcddp.units import format_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hpcddp.runs.folder import AttemptFolder

#: The variable with which ranks know the stamp of the `--fresh` that was typed; "": none was.
FRESH = "HPCDDP_FRESH"

NEW = "new"
RESUMES = "resumes"
BEGINS_AGAIN = "begins again"  # a run without a checkpoint
FINISHED = "finished"
SET_ASIDE = "set aside"  # by --fresh: a new run begins in its place


class RunRequest(Record):
    """A start's request. `folder`: the run's. `command`: as `identify_command` gives it; empty: not known. `fresh`: the
    stamp of `--fresh`; "": not asked. `takes_words`: `--resume`, the run is there and takes another command."""

    folder: str
    command: tuple[str, ...] = ()
    fresh: str = ""
    takes_words: bool = False

    def of_index(self, index: str) -> RunRequest:
        return self._replace(folder=f"{self.folder}.{index}") if index else self


class About(Record):
    """`run.json`, written when the run begins. `fresh`: its stamp, of `--fresh`. `program`: without arguments."""

    fresh: str = ""
    program: tuple[str, ...] = ()
    started: str = ""


class Outlook(Record):
    """The outcome of a start. `state`: what the ranks wrote last. `attempt`: after `start_run` the one that holds the
    run. `old`: where the folder was set aside, or will be. `unfinished`: of a new run, another one of the same
    program."""

    run: RunFolder
    kind: str
    step: int = 0
    state: RunState | None = None
    attempt: str = ""
    old: RunFolder | None = None
    unfinished: RunFolder | None = None

    def __str__(self) -> str:
        return self.describe()

    def describe(self, anew: str = "--fresh", by: str = "") -> str:
        """The line of a start. `anew`: how a new run is begun; `by`: who has finished it."""
        name = f"run {show_path(self.run.path)}: "
        if self.kind == FINISHED:
            state = self.state
            assert state is not None
            when = f" on {state.written_at[:10]}" if state.written_at else ""
            name += f"finished at step {self.step}{when}{by} ({state.reason}); no step is left"
            for what, count in (state.asked or {}).items():
                name += f" of the {format_count(count, what[:-1])} asked for"
            name += f"; to begin anew: {anew}"
        elif self.kind == RESUMES:
            name += f"resumes from step {self.step}"
        elif self.kind == BEGINS_AGAIN:
            name += "begins again, without a checkpoint"
        else:
            name += "new"
        if self.old is not None:
            name += f", as --fresh asks; the old one is {show_path(self.old.path)}"
        if self.unfinished is not None:
            other = show_path(self.unfinished.path)
            name += f" ({other} is unfinished; to resume it: --resume {other})"
        return name


def make_stamp() -> str:
    return f"{time.strftime('%Y%m%dT%H%M%S')}-{os.urandom(2).hex()}"


def is_run(run: RunFolder) -> bool:
    """Whether an attempt has been in this folder."""
    marks = (run.about, run.plan, run.state, run.holders, run.attempts, run.checkpoints, run.submitted, run.sweep)
    return any(os.path.exists(mark) for mark in marks)


def read_about(run: RunFolder) -> About:
    """SchemaError if another hpcddp made the folder."""
    return read_record(run.about, About) or About()


def start_run(
    request: RunRequest,
    attempt: str,
    env: Mapping[str, str],
    *,
    process: int,
    numbered: bool = False,
    before: str = "",
) -> Outlook:
    """Set the old folder aside where --fresh asks for it, begin the run where there is none, and hold it.

    `process`: what lives as long as the attempt, on this host. `numbered`: `attempt` is the job's name, of which the
    attempt's is made. `before`: the name of the job that queued this one. The errors of `inspect_run`; HeldError if
    another attempt holds the run; LaunchError for a folder that cannot be written.
    """
    job = find_current_job(env)
    request = request.of_index(job.array_index if job is not None else "")
    outlook = inspect_run(request)
    run, is_old = outlook.run, outlook.old is not None
    while True:
        name = number_attempt(run, attempt) if numbered else attempt
        hold(run.attempt(name), env, request.command, process=process, before=before)
        try:
            if is_old and _holds_run(run) and _is_other(run, request.fresh):
                outlook, is_old = outlook._replace(old=_rename(run)), False
                continue
            begin_run(run, request)
        except OSError as error:
            release_run(run, name)
            raise cannot_write(run, error) from error
        return outlook._replace(attempt=name)


def hold(
    attempt: AttemptFolder, env: Mapping[str, str], command: tuple[str, ...], *, process: int, before: str = ""
) -> None:
    """Hold the run for this attempt. The arguments and errors of `start_run`."""
    from hpcddp.schedulers.run import ask_job_state

    check_run_folder(attempt.run)
    mine = describe_process(attempt.name, process, env, command)
    take_run(attempt.run, mine, partial(ask_job_state, env=env), before)


def set_run_aside(request: RunRequest, env: Mapping[str, str]) -> RunFolder | None:
    """Set the folder aside and begin the run, before its job starts. None: nothing to set aside. HeldError;
    LaunchError."""
    run = RunFolder(request.folder)
    if not request.fresh or not _holds_run(run) or not _is_other(run, request.fresh):
        return None
    hold(run.attempt(f"fresh-{os.getpid()}"), env, request.command, process=os.getpid())
    try:
        old = _rename(run)
        begin_run(run, request)
    except OSError as error:
        raise cannot_write(run, error) from error
    return old


def _is_other(run: RunFolder, fresh: str) -> bool:
    return read_about(run).fresh != fresh


def _holds_run(run: RunFolder) -> bool:
    return any(map(os.path.exists, (run.about, run.state, run.settings)))


def _check_can_be_set_aside(run: RunFolder) -> None:
    name, path, here = show_path(run.path), os.path.realpath(run.path), os.path.realpath(os.getcwd())
    if f"{here}/".startswith(f"{path.rstrip('/')}/"):
        raise RequestError(
            f"--fresh would set {name} aside, and the job works in that folder", "give the run one of its own: --name X"
        )
    marks = (run.plan, run.attempts, run.checkpoints, run.submitted)
    # twice: another start may set the folder aside meanwhile, and write the new run's run.json before the others
    if not _holds_run(run) and any(map(os.path.exists, marks)) and not _holds_run(run):
        raise RequestError(
            f"--fresh would set {name} aside, and hpcddp has begun no run in it: it has no run.json",
            "another folder for the run: --name X",
        )


def begin_run(run: RunFolder, request: RunRequest) -> None:
    if not os.path.exists(run.about):
        record = About(request.fresh, identify_program(request.command), format_now())
        write_object(run.about, record._asdict())


def inspect_run(request: RunRequest) -> Outlook:
    """Find what a start would do now; writes nothing. RequestError; SchemaError; DamagedFileError."""
    run = RunFolder(request.folder)
    if request.fresh and request.takes_words:
        raise RequestError("--fresh begins a new run, and --resume resumes an old one", "keep one of the two")
    if request.takes_words and not is_run(run):
        raise RequestError(f"--resume {show_path(run.path)}: there is no such run", "hpcddp status lists the runs here")
    if request.fresh and is_run(run) and _is_other(run, request.fresh):
        _check_can_be_set_aside(run)
        return Outlook(run, SET_ASIDE, old=_name_old(run))
    if not any(map(os.path.exists, (run.state, run.holders, run.attempts, run.checkpoints))):
        return Outlook(run, NEW, unfinished=_find_unfinished(run, request))  # `hpcddp submit` may have made it
    state, saved = read_state(run), list_checkpoints(run.checkpoints)
    if state is not None and state.status == "finished" and saved:
        return Outlook(run, FINISHED, state.step, state)
    if saved:
        return Outlook(run, RESUMES, step_of(saved[-1]), state)
    return Outlook(run, BEGINS_AGAIN, 0, state)


_opened: dict[str, bool] = {}  # folders that this process has opened, and whether they are open still


@contextmanager
def opening_once(run: RunFolder) -> Iterator[None]:
    """The folder is open in the body. RequestError where this script has opened it before; a notebook may again."""
    path = os.path.realpath(run.path)
    if path in _opened and (_opened[path] or not is_interactive()):
        name = show_path(run.path)
        raise RequestError(
            f"this script has opened run {name} before: its second training would load the weights of the first",
            f'a run of its own for each, such as hpcddp.runtime(run_dir=f"{name}-{{n}}"), n = 1, 2, …; or a script',
        )
    _opened[path] = True
    try:
        yield
    finally:
        _opened[path] = False


def has_options(env: Mapping[str, str]) -> bool:
    """Whether a verb of hpcddp's has started this process, which takes --fresh, --accept and --keep."""
    return "HPCDDP_ATTEMPT" in env or FRESH in env


def end_script(line: str, status: int) -> None:
    """SystemExit, with this line, unless it is empty; nothing where a person types on."""
    if not is_interactive():
        if line:
            print(line, file=sys.stderr, flush=True)
        raise SystemExit(status)


def is_interactive() -> bool:
    """Whether a person types the script's lines one by one: in a notebook, or at Python's prompt."""
    return "ipykernel" in sys.modules or hasattr(sys, "ps1")


def _name_old(run: RunFolder) -> RunFolder:
    number = 1
    while os.path.lexists(f"{run.path}.old{number}"):
        number += 1
    return RunFolder(f"{run.path}.old{number}")


def _rename(run: RunFolder) -> RunFolder:
    import shutil

    old = _name_old(run)
    os.rename(run.path, old.path)
    for path in list_numbered(old.holders)[-1:]:  # the hold was for this only
        shutil.rmtree(path, ignore_errors=True)
    return old


def _find_unfinished(run: RunFolder, request: RunRequest) -> RunFolder | None:
    """The unfinished run of the same program beside this one that was begun last."""
    program, found = identify_program(request.command), list[tuple[str, str]]()
    with suppress(RequestError, OSError):
        for path in list_run_folders(os.path.dirname(run.path) or ".") if program else ():
            with suppress(DamagedFileError, RequestError):
                about, state = read_about(RunFolder(path)), read_state(RunFolder(path))
                is_old = re.search(r"\.old\d+$", path) is not None  # what was set aside was set aside
                if about.program == program and not is_old and state is not None and state.status == "unfinished":
                    found.append((about.started, path))
    return RunFolder(max(found)[1]) if found else None
