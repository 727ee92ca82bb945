"""The checkpoints of a run whose files a framework writes: complete, or not there.

`checkpoints/step-00001200/` in the run folder holds what the framework saved, or a `manifest.json` with the path of it.
The folder has another name until every rank has written; the manifest, which says the size of each file, is last.
Runs may share the folder that a framework saves to: a mark in it says whose the newest files are.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcddp.errors import RequestError
from hpcddp.record import Record
from hpcddp.runs.folder import AttemptFolder, RunFolder, name_checkpoint, step_of
from hpcddp.runs.state import Manifest, read_manifest
from hpcddp.training.activity import at_files
from hpcddp.training.checkpoint.files import MARK, commit, list_checkpoint_folders, remove_old
from hpcddp.training.checkpoint.resume import find_damage, find_newest
from hpcddp.units import format_count


class FrameworkCheckpoint(Record):
    """A complete checkpoint. `path`: what the framework loads."""

    path: str
    step: int
    epoch: int
    world_size: int
    global_batch: int | None
    seconds: float  # that it took to write
    damaged: dict[str, str]  # newer ones, each with its damage


def find_saved(run: RunFolder, framework: str) -> FrameworkCheckpoint | None:
    """The newest checkpoint of the run that is whole; None: there is none. Each rank looks by itself, as Lightning has
    to know the checkpoint before it makes the process group.

    RequestError if something else than this framework wrote it, or if none is whole; LaunchError if this host cannot
    read one; SchemaError.
    """
    host = os.uname().nodename
    newest, damaged = find_newest(
        list_checkpoint_folders(Path(run.checkpoints)),
        lambda path: find_damage(path, [host], framework=framework),
        "begin a new run: --fresh",
    )
    if newest is None:
        return None
    manifest = read_manifest(str(newest)) or Manifest()
    entries = {name: getattr(manifest, name) for name in ("epoch", "world_size", "global_batch", "seconds")}
    return FrameworkCheckpoint(path=manifest.path or str(newest), step=step_of(newest.name), damaged=damaged, **entries)


def check_world(
    saved: FrameworkCheckpoint, world_size: int, global_batch: int | None, *, fixed: str = ""
) -> str | None:
    """A line to print before this checkpoint is resumed on so many ranks, or None. RequestError if it would be wrong.

    Frameworks count steps and batches per rank: their place in the data, and the learning rate's, are right only as
    long as a step has as many samples as before. `fixed`: why this checkpoint fits no other number of ranks at all.
    """
    if saved.world_size == world_size:
        return None
    before, now = format_count(saved.world_size, "rank"), format_count(world_size, "rank")
    if fixed or global_batch is None or saved.global_batch is None:
        why = fixed or "the loop counts batches per rank, and would repeat or leave out samples"
        raise RequestError(
            f"the checkpoint of step {saved.step} is of {before}, and here are {now}: {why}",
            f"resume on {before} with the same batch, or begin a new run: --fresh",
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
        Path(elsewhere, MARK).write_text(entries["mark"], encoding="utf-8")
    commit(partial, _list_sizes(Path(elsewhere or partial)), entries)
    remove_old(partial.parent, keep)


def _list_sizes(folder: Path) -> dict[str, Any]:
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): {"bytes": path.stat().st_size} for path in sorted(found)}
