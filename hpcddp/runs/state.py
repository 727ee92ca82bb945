"""How far a run is, in `state.json`, and the other files that its ranks write and the next attempt reads."""

from __future__ import annotations

import os
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
from hpcddp.runs.jsonfile import DamagedFileError, format_now, make_damaged, read_object, read_record, write_object
from hpcddp.runs.lock import check_not_taken

MODES = ("max", "min")
#: Why a run is finished that has made all its steps.
AT_ITS_END = "the training loop came to its end"
_STATUSES = ("unfinished", "finished", "failed")
_BEST = "best.json"


# ---- best.json, beside the checkpoints


class Best(Record):
    """The best value of the user's number so far and the step of its checkpoint. `mode`: max | min is better."""

    value: float
    mode: str
    step: int


def read_best(checkpoints: str) -> Best | None:
    """The best of the checkpoints in this folder; None: none is named, or it is gone. DamagedFileError; SchemaError."""
    best = read_record(os.path.join(checkpoints, _BEST), Best)
    return best if best is not None and os.path.exists(name_checkpoint(checkpoints, best.step)) else None


def write_best(checkpoints: str, best: Best) -> None:
    write_object(os.path.join(checkpoints, _BEST), best._asdict(), durable=True)


# ---- run.json and plan.json


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
    """SchemaError if another hpcddp made the folder: all its files have the schema of `run.json`."""
    read_object(run.about)


def open_attempt(attempt: AttemptFolder) -> None:
    """Make the attempt's folder. LaunchError if that is not possible; before, SchemaError."""
    check_run_folder(attempt.run)
    try:
        os.makedirs(attempt.path, exist_ok=True)
        if not os.path.exists(attempt.run.about):
            write_object(attempt.run.about, {})
    except OSError as error:
        raise cannot_write(attempt.run, error) from error


def read_plan_file(run: RunFolder) -> PlanFile:
    """Read `plan.json`; an empty one if there is no such file. DamagedFileError; SchemaError."""
    return read_record(run.plan, PlanFile) or PlanFile()


def write_plan_file(run: RunFolder, plan: PlanFile) -> None:
    write_object(run.plan, {name: value for name, value in plan._asdict().items() if value is not None})


def read_planned_batch(run: RunFolder) -> int | None:
    """The global batch of the job's plan; None: there is no plan. DamagedFileError; SchemaError."""
    check_run_folder(run)
    return read_plan_file(run).global_batch


# ---- a checkpoint's manifest.json, an attempt's versions.json


class Manifest(Record):
    """The part of a checkpoint's `manifest.json` that is read again. `files`: by name, each with its `bytes`, and its
    `sha256` if hpcddp wrote it. `framework`: that wrote the checkpoint, if hpcddp did not; `path`: where, if not in
    this folder; `mark`: in the file there that says whose it is. `tail_s`: that training took behind its last step."""

    files: dict[str, dict[str, Any]] | None = None
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


class Versions(Record):
    """The part of `versions.json`, what an attempt ran with, that is read again. `plan`: of the global batch."""

    plan: dict[str, Any] | None = None


def read_versions(attempt: AttemptFolder) -> Versions | None:
    """Read the versions of an attempt; None if there is no such file. DamagedFileError; SchemaError."""
    return read_record(attempt.versions, Versions)


# ---- state.json


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


def read_state(run: RunFolder) -> RunState | None:
    """Read the state that the ranks wrote last; None if there is no such file. DamagedFileError; SchemaError."""
    check_run_folder(run)
    state = read_record(run.state, RunState)
    if state is not None and state.status not in _STATUSES:
        raise make_damaged(run.state, f"its status is {state.status!r}")
    return state


def read_finish(run: RunFolder) -> RunState | None:
    """The state of a run that is finished and has a checkpoint; else None. The errors of `read_state`."""
    state = read_state(run)
    return state if state is not None and state.status == "finished" and list_checkpoints(run.checkpoints) else None


def write_state(attempt: AttemptFolder, status: str, *, step: int, epoch: int, reason: str, **more: Any) -> None:
    """Replace `state.json`. `more`: RunState's other fields. HeldError if another attempt has taken the run;
    LaunchError."""
    check_not_taken(attempt.run, attempt.name)
    try:
        replace_state(attempt.run, RunState(status, step, epoch, reason, attempt.name, **more))
    except OSError as error:
        raise cannot_write(attempt.run, error) from error


def record_checkpoint(attempt: AttemptFolder, *, step: int, epoch: int) -> None:
    """Replace `state.json`: this checkpoint is there, and the attempt trains on. HeldError as `write_state`."""
    reason = f"checkpoint at step {step}; the attempt has not ended"
    write_state(attempt, "unfinished", step=step, epoch=epoch, reason=reason, ended=False)


def correct_killed(run: RunFolder, state: RunState) -> RunState:
    """The state of an attempt that has ended, also where it was killed and could not write that."""
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
    """Whether the attempt wrote that it stopped by a signal. Then `signal`, which was sent to the script, is the
    reason."""
    state = read_state(attempt.run)
    if state is None or state.attempt != attempt.name or not state.reason.startswith("SIG"):
        return False
    if state.reason != signal:
        with suppress(OSError):
            replace_state(attempt.run, state._replace(reason=signal))
    return True


def write_failure(attempt: AttemptFolder, reason: str, *, step: int, epoch: int) -> None:
    """Replace `state.json` by `failed`, unless the run is finished or its state cannot be read. An attempt that failed
    at step 0 has loaded no checkpoint: the run is where the newest one is. HeldError."""
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
    """Step and epoch of the newest checkpoint; 0: not known."""
    epoch, saved = None, list_checkpoints(run.checkpoints)
    with suppress(DamagedFileError):
        manifest = read_manifest(saved[-1]) if saved else None
        epoch = manifest.epoch if manifest is not None else None
    return step_of(saved[-1]) if saved else 0, epoch if isinstance(epoch, int) else 0


def replace_state(run: RunFolder, state: RunState) -> None:
    known = {name: value for name, value in state._asdict().items() if value is not None}
    write_object(run.state, known | {"written_at": format_now()})
