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

from hpcddp.errors import RequestError
from hpcddp.record import Record
from hpcddp.runs.folder import MANIFEST, AttemptFolder, RunFolder, list_checkpoints, name_checkpoint, step_of
from hpcddp.runs.jsonfile import DamagedFileError, read_object
from hpcddp.training.checkpoint.files import commit, remove_old

_MARK = "hpcddp-run"  # a file in a folder that a framework has saved to


class Saved(Record):
    """A complete checkpoint. `path`: what the framework loads."""

    path: str
    step: int
    epoch: int
    world_size: int
    global_batch: int | None
    seconds: float  # that it took to write


def find_newest(run: RunFolder, framework: str) -> Saved | None:
    """The newest complete checkpoint of the run; an incomplete one is named.

    RequestError if something else than this framework wrote it; NewerFileError.
    """
    for folder in reversed(list_checkpoints(run.checkpoints)):
        try:
            manifest = read_object(os.path.join(folder, MANIFEST)) or {}
            fault = _find_fault(folder, manifest)
        except DamagedFileError as error:
            manifest, fault = {}, error.message
        if manifest and manifest.get("framework") != framework:
            raise RequestError(
                f"checkpoint {folder} was written by {manifest.get('framework', 'hpcddp.runtime')}, not by {framework}",
                "begin a new run: --fresh",
            )
        if fault is None:
            path = manifest.get("path") or folder
            facts: dict[str, Any] = {
                name: manifest.get(name) for name in ("epoch", "world_size", "global_batch", "seconds")
            }
            return Saved(path=path, step=step_of(folder), **facts)
        print(f"hpcddp: checkpoint {folder} is not used: {fault}", file=sys.stderr, flush=True)
    return None


def _find_fault(folder: str, manifest: Mapping[str, Any]) -> str | None:
    """Why the checkpoint cannot be loaded; None if it can."""
    files, below = manifest.get("files"), manifest.get("path") or folder
    if not isinstance(files, dict):
        return f"it has no complete {MANIFEST}"
    for name, size in files.items():
        try:
            found = os.stat(os.path.join(below, name)).st_size
        except OSError as error:
            return f"{os.path.join(below, name)}: {(error.strerror or str(error)).lower()}"
        if found != size:
            return f"{os.path.join(below, name)} has {found} bytes, the manifest says {size}"
    if "mark" in manifest and _read_mark(below) != manifest["mark"]:
        return f"{below} was written over by another run"
    return None


def _read_mark(folder: str) -> str | None:
    try:
        return Path(folder, _MARK).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


def name_partial(attempt: AttemptFolder, step: int) -> Path:
    """Where the checkpoint of this step is written: the same path on every rank, and no other attempt's."""
    return Path(f"{name_checkpoint(attempt.run.checkpoints, step)}.tmp-{attempt.name}")


def begin(attempt: AttemptFolder, step: int) -> None:
    """Make the folder of `name_partial` anew."""
    partial = name_partial(attempt, step)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def complete(attempt: AttemptFolder, step: int, keep: int, facts: Mapping[str, Any]) -> None:
    """Every rank has written. `facts`: Saved's fields; `path` if the framework has saved elsewhere.

    Of the complete checkpoints the newest `keep` stay.
    """
    partial, target = name_partial(attempt, step), name_checkpoint(attempt.run.checkpoints, step)
    if os.path.isdir(target):  # the attempt has saved this step before
        os.rename(target, f"{target}.old-{attempt.name}")
    if elsewhere := facts.get("path"):
        facts = {**facts, "mark": secrets.token_hex(8)}
        Path(elsewhere, _MARK).write_text(facts["mark"], encoding="utf-8")
    commit(partial, _list_sizes(Path(elsewhere or partial)), facts)
    remove_old(partial.parent, keep)


def _list_sizes(folder: Path) -> dict[str, Any]:
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(found)}
