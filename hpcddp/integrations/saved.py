"""The checkpoints of a run whose files a framework writes: complete, or not there.

`checkpoints/step-00001200/` in the run folder holds what the framework saved, or a `manifest.json` with the path of it.
The folder has another name until every rank has written; the manifest, which says the size of each file, is last.
Runs may share the folder that a framework saves to: a mark in it says whose the newest files are.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcddp.errors import LaunchError, RequestError
from hpcddp.record import Record
from hpcddp.runs.folder import MANIFEST, AttemptFolder, RunFolder, list_checkpoints, name_checkpoint, step_of
from hpcddp.runs.jsonfile import DamagedFileError, UnreadableFileError
from hpcddp.runs.state import Manifest, read_manifest
from hpcddp.training.activity import at_files
from hpcddp.training.checkpoint.files import commit, find_file_fault, remove_old
from hpcddp.units import format_count

_MARK = "hpcddp-run"  # a file in a folder that a framework has saved to


class FrameworkCheckpoint(Record):
    """A complete checkpoint. `path`: what the framework loads."""

    path: str
    step: int
    epoch: int
    world_size: int
    global_batch: int | None
    seconds: float  # that it took to write


def find_newest(run: RunFolder, framework: str) -> FrameworkCheckpoint | None:
    """The newest complete checkpoint of the run; newer ones, which are not whole, are named. None: there is none.

    RequestError if something else than this framework wrote it, or if none is whole; LaunchError if this host cannot
    read one; SchemaError.
    """
    faults: list[str] = []
    for folder in reversed(list_checkpoints(run.checkpoints)):
        manifest, fault = _inspect(folder)
        if manifest is not None and manifest.framework != framework:
            raise RequestError(
                f"checkpoint {folder} was written by {manifest.framework or 'hpcddp.runtime'}, not by {framework}",
                "begin a new run: --fresh",
            )
        if manifest is not None and fault is None:
            path = manifest.path or folder
            names = ("epoch", "world_size", "global_batch", "seconds")
            entries: dict[str, Any] = {name: getattr(manifest, name) for name in names}
            return FrameworkCheckpoint(path=path, step=step_of(folder), **entries)
        faults.append(f"checkpoint {folder} is not used: {fault}")
        print(f"hpcddp: {faults[-1]}", file=sys.stderr, flush=True)
    if faults:
        raise RequestError(
            f"{faults[0]}; the run has no other one to resume from",
            "restore it from a copy, or begin a new run: --fresh",
        )
    return None


def _inspect(folder: str) -> tuple[Manifest | None, str | None]:
    """The manifest if there is a complete one, and why the checkpoint cannot be loaded; None if it can. LaunchError if
    this host cannot read it: the file system may be away, and that is no damage."""
    try:
        manifest = read_manifest(folder)
        if manifest is None or manifest.files is None:
            return None, f"it has no complete {MANIFEST}"
        below = Path(manifest.path or folder)
        fault = find_file_fault(below, manifest.files)
        if fault is None and manifest.mark is not None and _read_mark(below) != manifest.mark:
            fault = f"{below} was written over by another run"
        return manifest, fault
    except (OSError, UnreadableFileError) as error:
        host = os.uname().nodename
        raise LaunchError(
            f"{host} cannot read checkpoint {folder}, which stays as it is: {getattr(error, 'message', error)}",
            f"look at it on {host}: ls -l {folder}",
        ) from error
    except DamagedFileError as error:
        return None, error.message


def _read_mark(folder: Path) -> str | None:
    try:
        return (folder / _MARK).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def check_world(
    saved: FrameworkCheckpoint, world_size: int, global_batch: int | None, *, fixed: str = ""
) -> str | None:
    """A line to print before this checkpoint is resumed on so many ranks, or None. RequestError if
    the resume would be wrong.

    Frameworks count steps and batches per rank: their place in the data, and the learning rate's, are right only as
    long as a step has as many samples as before. `fixed`: why this checkpoint fits no other number of ranks at all.
    """
    before, now = format_count(saved.world_size, "rank"), format_count(world_size, "rank")
    hint = f"resume on {before} with the same batch, or begin a new run: --fresh"
    if saved.world_size != world_size and fixed:
        raise RequestError(f"the checkpoint of step {saved.step} is of {before}, and here are {now}: {fixed}", hint)
    if saved.world_size == world_size:
        return None
    if global_batch is None or saved.global_batch is None:
        raise RequestError(
            f"the checkpoint of step {saved.step} is of {before}, and here are {now}: the loop counts batches per rank,"
            " and would repeat or leave out samples",
            hint,
        )
    if global_batch != saved.global_batch:  # which was accepted
        return None
    return (
        f"warning: resumed from step {saved.step} of {before} on {now}: as many samples per step, but the rest of the"
        " epoch has them in another order, and other random numbers"
    )


def name_partial(attempt: AttemptFolder, step: int) -> Path:
    """The path at which the checkpoint of this step is written: the same on every rank, and no other attempt's."""
    return Path(f"{name_checkpoint(attempt.run.checkpoints, step)}.tmp-{attempt.name}")


@at_files()
def make_partial(attempt: AttemptFolder, step: int) -> None:
    """Make the folder of `name_partial` anew."""
    partial = name_partial(attempt, step)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


@at_files()
def complete_checkpoint(attempt: AttemptFolder, step: int, keep: int, entries: Mapping[str, Any]) -> None:
    """Every rank has written. `entries`: FrameworkCheckpoint's fields; `path` if the framework has saved elsewhere.

    Of the complete checkpoints the newest `keep` stay.
    """
    partial, target = name_partial(attempt, step), name_checkpoint(attempt.run.checkpoints, step)
    if os.path.isdir(target):  # the attempt has saved this step before
        os.rename(target, f"{target}.old-{attempt.name}")
    if elsewhere := entries.get("path"):
        entries = {**entries, "mark": secrets.token_hex(8)}
        Path(elsewhere, _MARK).write_text(entries["mark"], encoding="utf-8")
    commit(partial, _list_sizes(Path(elsewhere or partial)), entries)
    remove_old(partial.parent, keep)


def _list_sizes(folder: Path) -> dict[str, Any]:
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): {"bytes": path.stat().st_size} for path in sorted(found)}
