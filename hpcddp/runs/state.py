"""`state.json`: how far a run is. Rank 0 writes it; job scripts, the next attempt and people read it."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from typing import Any

from hpcddp.record import Record
from hpcddp.runs.folder import (
    MANIFEST,
    AttemptFolder,
    RunFolder,
    cannot_write,
    list_checkpoints,
    name_checkpoint,
    step_of,
)
from hpcddp.runs.jsonfile import DamagedFileError, damaged, read_object, read_record, write_object
from hpcddp.runs.lock import check_not_taken

# Which checkpoint of a run is the best by a number of the user's. `best.json` beside the checkpoints names it.


_FILE = "best.json"
MODES = ("max", "min")


class Best(Record):
    """The best value so far and the step of its checkpoint. `mode`: whether larger or smaller is better."""

    value: float
    mode: str
    step: int


def read_best(checkpoints: str) -> Best | None:
    """The best of the checkpoints in this folder; None if none was named, or it is no longer there.

    SchemaError if another hpcddp named it; DamagedFileError if the file names none.
    """
    path, remedy = os.path.join(checkpoints, _FILE), "; without the file rt.save_best() begins anew"
    best = read_record(path, Best, remedy)
    if best is not None and best.mode not in MODES:
        raise damaged(path, f"its mode is {best.mode!r}", remedy)
    if best is not None and best.step < 0:
        raise damaged(path, f"its step is {best.step}", remedy)
    return best if best is not None and os.path.exists(name_checkpoint(checkpoints, best.step)) else None


def write_best(checkpoints: str, best: Best) -> None:
    """Name a checkpoint, which is complete, as the best one."""
    write_object(os.path.join(checkpoints, _FILE), best._asdict(), durable=True)


# A run folder is opened: by this hpcddp, if `run.json` has the schema that it writes. So has every other file then.


_PLAN_REMEDY = "; then render the job again, or remove it"


class PlanFile(Record):
    """A run's `plan.json`: its job, as it was submitted, and then as its script says. None: not known. `launcher`: of
    the ranks. `point`: of a sweep."""

    site: str | None = None
    scheduler: str | None = None
    launcher: str | None = None
    nodes: int | None = None
    ranks_per_node: int | None = None
    world_size: int | None = None
    gpus_per_node: int | None = None
    global_batch: int | None = None
    command: list[str] | None = None
    point: dict[str, Any] | None = None


def check_run_folder(run: RunFolder) -> None:
    """SchemaError if another hpcddp made the folder."""
    read_object(run.about, "; then restore it, or remove it: the next attempt writes it again")


def check_can_begin(run: RunFolder) -> None:
    """Check the folder before an attempt writes anything: the errors of `check_run_folder` and `read_best`."""
    check_run_folder(run)
    read_best(run.checkpoints)


def open_attempt(attempt: AttemptFolder) -> None:
    """Make the attempt's folder. LaunchError if that is not possible; before, the errors of `check_can_begin`."""
    check_can_begin(attempt.run)
    try:
        os.makedirs(attempt.path, exist_ok=True)
        if not os.path.exists(attempt.run.about):
            write_object(attempt.run.about, {})
    except OSError as error:
        raise cannot_write(attempt.run, error) from error


def read_plan_file(run: RunFolder) -> PlanFile:
    """Read `plan.json`; an empty one if there is no such file. DamagedFileError; SchemaError."""
    return read_record(run.plan, PlanFile, _PLAN_REMEDY) or PlanFile()


def write_plan_file(run: RunFolder, plan: PlanFile) -> None:
    """Replace `plan.json`. OSError."""
    write_object(run.plan, {name: value for name, value in plan._asdict().items() if value is not None})


def read_planned_batch(run: RunFolder) -> int | None:
    """The global batch of the job plan that the script left in the run folder; None if it left none.

    RequestError if the plan cannot be read, or is another hpcddp's.
    """
    check_run_folder(run)
    return read_plan_file(run).global_batch


# `manifest.json` in the folder of a checkpoint.


class Manifest(Record):
    """What is read again of it. `files`: by name, each with its `bytes`, and its `sha256` if hpcddp wrote it. `form`:
    single | sharded. `framework`: that wrote the checkpoint, if hpcddp did not; `path`: where, if not in this folder;
    `mark`: in the file there that says whose it is. `tail_s`: that training took behind its last step."""

    files: dict[str, dict[str, Any]] | None = None
    form: str | None = None
    framework: str | None = None
    path: str | None = None
    mark: str | None = None
    step: int | None = None
    epoch: Any = None  # a framework's may be a part of one
    world_size: int | None = None
    global_batch: int | None = None
    seconds: float | None = None
    tail_s: float | None = None
    weights_sha256: str | None = None
    exact: dict[str, Any] | None = None


def read_manifest(checkpoint: str) -> Manifest | None:
    """None if there is no such file. DamagedFileError; SchemaError if another hpcddp wrote it."""
    return read_record(os.path.join(checkpoint, MANIFEST), Manifest)


# `versions.json`: what an attempt ran with.


class Versions(Record):
    """`plan`: of the global batch. `ranks`: each with its host. `exact`: how an exact run sums. `others`: versions of
    libraries, and settings, by name."""

    plan: dict[str, Any] | None = None
    ranks: list[dict[str, Any]] | None = None
    exact: str | None = None
    others: dict[str, Any] | None = None


def read_versions(attempt: AttemptFolder) -> Versions | None:
    """Read the versions of an attempt; None if there is no such file. DamagedFileError; SchemaError."""
    known, content = read_record(attempt.versions, Versions), read_object(attempt.versions) or {}
    others = {name: value for name, value in content.items() if name not in Versions._fields}
    return known._replace(others=others) if known is not None else None


#: Why a run is finished that has made all its steps.
AT_ITS_END = "the training loop came to its end"
_STATUSES = ("unfinished", "finished", "failed")
_REMEDY = "; then restore it, or remove it: the checkpoints do not need it"


class RunState(Record):
    """`status`: unfinished | finished | failed. `step`: optimizer steps over all attempts. `attempt` wrote it."""

    status: str
    step: int
    epoch: int
    reason: str
    attempt: str
    weights_sha256: str | None = None  # of the tracked models after this step
    exact: dict[str, Any] | None = None  # of an exact run: its method, and why it is not exact any more
    ended: bool = True  # whether the attempt had ended, or was about to
    asked: dict[str, int] | None = None  # of a finished run: {"epochs": 4} or {"steps": 100}
    written_at: str = ""

    def __str__(self) -> str:
        return f"{self.status} at step {self.step} ({self.reason}), attempt {self.attempt}"


def read_state(run: RunFolder) -> RunState | None:
    """Read the state that the ranks wrote last; None if there is no such file.

    DamagedFileError if it cannot be read as a state: nobody may take it for "nothing was written", and replace it.
    SchemaError if another hpcddp wrote the file or the run folder.
    """
    check_run_folder(run)
    state = read_record(run.state, RunState, _REMEDY)
    if state is not None and state.status not in _STATUSES:
        raise damaged(run.state, f"its status is {state.status!r}", _REMEDY)
    if state is not None and not isinstance((state.exact or {}).get("deviations", []), list):
        raise damaged(run.state, f"its exact is {state.exact!r}", _REMEDY)
    return state


def read_finish(run: RunFolder) -> RunState | None:
    """The state of a run that is finished; None for one that is not, or whose weights nobody could load again. The
    errors of `read_state`."""
    state = read_state(run)
    return state if state is not None and state.status == "finished" and list_checkpoints(run.checkpoints) else None


def write_state(attempt: AttemptFolder, status: str, *, step: int, epoch: int, reason: str, **more: Any) -> None:
    """Replace `state.json`. `more`: RunState's other fields. HeldError if another attempt has taken the run,
    LaunchError if the file cannot be written."""
    check_not_taken(attempt.run, attempt.name)
    try:
        replace_state(attempt.run, RunState(status, step, epoch, reason, attempt.name, **more))
    except OSError as error:
        raise cannot_write(attempt.run, error) from error


def note_checkpoint(attempt: AttemptFolder, *, step: int, epoch: int) -> None:
    """Replace `state.json`: this checkpoint is there, and the attempt trains on. HeldError as `write_state`."""
    reason = f"checkpoint at step {step}; the attempt has not ended"
    write_state(attempt, "unfinished", step=step, epoch=epoch, reason=reason, ended=False)


def correct_killed(run: RunFolder, state: RunState) -> RunState:
    """The state of an attempt that has ended, also where it was killed and could not write that: where the run
    resumes."""
    if state.ended:
        return state
    step, epoch = _find_newest(run)
    if step > state.step:  # it was killed between the checkpoint and the state
        state = state._replace(step=step, epoch=epoch)
    return state._replace(reason=f"checkpoint at step {state.step}; the attempt has ended since", ended=True)


def step_back(run: RunFolder, state: RunState, reason: str) -> RunState:
    """The state at the run's newest checkpoint, unfinished: what came after that is lost."""
    step, epoch = _find_newest(run)
    digest = state.weights_sha256 if step == state.step else None
    return RunState("unfinished", step, epoch, reason, state.attempt, digest, state.exact)


def correct_signal(attempt: AttemptFolder, signal: str) -> bool:
    """Whether the attempt stopped by a signal, as it wrote. Then `signal` is the reason: what was sent to the script,
    which the launcher may have handed on as another one."""
    state = read_state(attempt.run)
    if state is None or state.attempt != attempt.name or not re.fullmatch("SIG[A-Z0-9]+", state.reason):
        return False
    if state.reason != signal:
        with suppress(OSError):
            replace_state(attempt.run, state._replace(reason=signal))
    return True


def write_failure(attempt: AttemptFolder, reason: str, *, step: int, epoch: int) -> None:
    """Replace `state.json` by `failed`. HeldError if another attempt has taken the run.

    An attempt that failed at step 0 of a run with checkpoints has loaded none: the run is where the newest one is, and
    one that was finished stays so. So does a state that cannot be read.
    """
    if step == 0 and list_checkpoints(attempt.run.checkpoints):
        step, epoch = _find_newest(attempt.run)
        try:
            state = read_state(attempt.run)
        except DamagedFileError:
            return
        if state is not None and state.status == "finished":
            return
    write_state(attempt, "failed", step=step, epoch=epoch, reason=reason)


def _find_newest(run: RunFolder) -> tuple[int, int]:
    """Step and epoch of the newest checkpoint; 0 and 0 without one, and epoch 0 if its manifest does not say it."""
    epoch, saved = None, list_checkpoints(run.checkpoints)
    with suppress(DamagedFileError):
        manifest = read_manifest(saved[-1]) if saved else None
        epoch = manifest.epoch if manifest is not None else None
    return step_of(saved[-1]) if saved else 0, epoch if isinstance(epoch, int) else 0


def replace_state(run: RunFolder, state: RunState) -> None:
    known = {name: value for name, value in state._asdict().items() if value is not None}
    write_object(run.state, known | {"written_at": time.strftime("%Y-%m-%dT%H:%M:%S%z")})
