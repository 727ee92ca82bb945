"""The run of a process that no job script started: rank 0 chooses it, and holds it as long as the runtime is open."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NamedTuple

from hpcddp.errors import HpcddpError, LaunchError
from hpcddp.ranks.launchers import LAUNCHERS
from hpcddp.runs.choice import Asked, Spelling
from hpcddp.runs.command import identify_command
from hpcddp.runs.folder import AttemptFolder, RunFolder, choose_attempt, find_attempt, show_path
from hpcddp.runs.jsonfile import DamagedFileError
from hpcddp.runs.lock import is_held_by, release_run
from hpcddp.runs.opening import check_attempt, read_plan
from hpcddp.runs.own_runs import note_own_run
from hpcddp.runs.start import hold_run, start_run
from hpcddp.runs.starts import list_starts
from hpcddp.runs.state import read_finish
from hpcddp.training.options import RuntimeOptions
from hpcddp.training.rendezvous.failure import Failure, PeerFailedError
from hpcddp.training.rendezvous.group import Group
from hpcddp.training.rendezvous.roll_call import wait_until
from hpcddp.training.rendezvous.shutdown import claim_failure
from hpcddp.training.setup import ANEW

_OF_ARGUMENTS = Spelling("resume=False", "resume", 'resume="{}"', "resume=False, or another run_dir")
_ALL_READ_S = 60.0
_openings = itertools.count()  # a group may see several runtimes
_opened: set[AttemptFolder] = set()  # what this process has opened in a job: its next training may be another one


class OpenedRun(NamedTuple):
    """This attempt at a run. None: nothing is written. `over`: why the run ended, of one that an earlier start of this
    job has finished; empty: there may be steps left. `loads`: whether the newest checkpoint is loaded, if there is one.
    `is_strict`: whether it has to be of a training with the same data and settings.
    """

    attempt: AttemptFolder | None
    over: str = ""
    loads: bool = True
    is_strict: bool = False


@contextmanager
def open_run(
    folder: AttemptFolder | None, group: Group, env: Mapping[str, str], options: RuntimeOptions
) -> Iterator[OpenedRun]:
    """The attempt's folder, the same on every rank: in the run that the job script chose, else in the one that rank 0
    chooses for `folder` as its base. Rank 0 holds the run if the job script does not.

    The HpcddpError of `start_run` on rank 0, PeerFailedError on the others.
    """
    if folder is None:
        yield OpenedRun(None)
        return
    key = f"run-{next(_openings)}"
    if not group.is_first:
        told = json.loads(group.store.get(key))
        if told["error"]:
            group.store.add(f"{key}-read", 1)
            raise PeerFailedError(Failure(0, group.members[0].host, told["error"]))
        mine = RunFolder(told["run"]).attempt(told["attempt"])
        yield OpenedRun(mine, told["over"], told["loads"], told["is_strict"])
        return
    try:
        opened, is_mine = _start(folder, env, options)
    except HpcddpError as error:
        claim_failure(group, error)
        group.store.set(key, json.dumps({"error": str(error)}))
        # the store ends with this process: a rank that is late would see nothing but a broken connection
        wait_until(lambda: group.store.add(f"{key}-read", 0) >= group.world_size - 1, _ALL_READ_S)
        raise
    attempt = opened.attempt
    assert attempt is not None
    told = opened._asdict() | {"error": "", "run": attempt.run.path, "attempt": attempt.name}
    group.store.set(key, json.dumps(told))
    try:
        yield opened
    finally:
        if is_mine:
            release_run(attempt.run, attempt.name)


def say_anew(folder: AttemptFolder | None, env: Mapping[str, str]) -> str:
    """How to begin a new run: by the job's options, also where its script calls `hpcddp.runtime` itself."""
    return f"begin a new run: {Spelling().fresh}" if folder is not None and _is_of_script(folder, env) else ANEW


def _is_of_script(folder: AttemptFolder, env: Mapping[str, str]) -> bool:
    """Whether the job script chose this run."""
    of_script = os.path.realpath(env.get("HPCDDP_RUN_DIR", ""))
    return bool(env.get("HPCDDP_ATTEMPT")) and os.path.realpath(folder.run.path) == of_script


def _find_job_s(folder: AttemptFolder, env: Mapping[str, str], options: RuntimeOptions) -> AttemptFolder:
    """The job's run, where a script asks for the name whose next number that got: `m`, in a job that has `m-2`."""
    job_s = choose_attempt(env) if env.get("HPCDDP_ATTEMPT") else None
    if job_s is None or isinstance(options.resume, str):
        return folder
    with suppress(DamagedFileError):
        name = os.path.basename(read_plan(job_s.run).run_dir)
        named = os.path.join(os.path.dirname(job_s.run.path), name)
        if name and os.path.realpath(named) == os.path.realpath(folder.run.path):
            return job_s
    return folder


def _start(folder: AttemptFolder, env: Mapping[str, str], options: RuntimeOptions) -> tuple[OpenedRun, bool]:
    """The run, and whether this process holds it."""
    command = identify_command(sys.orig_argv)
    folder = _find_job_s(folder, env, options)
    if _is_of_script(folder, env):
        _check_not_finished(folder)
        earlier = list_starts(folder)[:-1]
        # what an earlier start of this job has begun anew is resumed, and what it has finished stays so
        loads, over = options.resume is not False or bool(earlier), _why_over(folder, earlier)
        opened = OpenedRun(folder, over, loads, bool(over) or _is_again(folder))
        if is_held_by(folder.run, folder.name):
            return opened, False
        hold_run(folder, env, command, process=os.getpid())
        return opened, True
    resume = options.resume if isinstance(options.resume, str) else None
    asked = Asked(folder.run.path, command, options.resume is False, resume, _OF_ARGUMENTS)
    job_s = find_attempt(env)
    starts = list_starts(job_s) if job_s is not None else []
    within = starts[0].path if starts else ""
    choice = start_run(
        asked,
        folder.name,
        env,
        process=os.getpid(),
        by_hand=True,
        within=within,
        restart=_count_restarts(env),
        earlier=tuple(one.name for one in starts[:-1]),
    )
    print(f"hpcddp: {choice}", file=sys.stderr, flush=True)
    is_again = False
    if job_s is not None and within:
        note_own_run(job_s, choice.run)
        is_again = _is_again(choice.run.attempt(folder.name))
    is_strict = bool(choice.over) or not choice.is_same or (is_again and resume is None)
    return OpenedRun(choice.run.attempt(folder.name), choice.over, is_strict=is_strict), True


def _is_again(attempt: AttemptFolder) -> bool:
    """Whether this process has opened the run before. Its training was lost by an error that the script has caught, or
    it was stopped; what comes now is the same once more, or the next of several."""
    known = RunFolder(os.path.realpath(attempt.run.path)).attempt(attempt.name)
    is_again = known in _opened
    _opened.add(known)
    return is_again


def _why_over(folder: AttemptFolder, earlier: list[AttemptFolder]) -> str:
    """Why one of the earlier starts of this job has finished its run; "" if none has."""
    finish = read_finish(folder.run)
    return finish.reason if finish is not None and folder.run.attempt(finish.attempt) in earlier else ""


def _count_restarts(env: Mapping[str, str]) -> int:
    """How often a launcher has started the ranks of this attempt again by itself."""
    counts = (env.get(row.restarts, "") for row in LAUNCHERS.values() if row.restarts)
    return sum(int(count) for count in counts if count.isdecimal())


def _check_not_finished(folder: AttemptFolder) -> None:
    """LaunchError if this attempt has finished the job's run already: a second runtime, as for the next fold or the
    next learning rate, would load the weights of the first one and train nothing."""
    finish = read_finish(folder.run)
    if finish is None or finish.attempt != folder.name:
        return
    check_attempt(folder)  # of another hpcddp's file there is more to say
    path = show_path(folder.run.path)
    raise LaunchError(
        f"this attempt has finished run {path} already, at step {finish.step}: another runtime in this job would"
        " load those weights and train nothing",
        f'a run of its own for each, such as hpcddp.runtime(run_dir=f"{path}-{{n}}"), n = 1, 2, …',
    )
