"""Checkpoint folders that are either whole or not there.

`step-00001200/` holds `state.pt`, for a split checkpoint one more file per rank, and `manifest.json` with sizes and
SHA-256 sums of all of them. It is written under another name, made durable file by file, and renamed: a kill at any
moment leaves the older checkpoints as they were. A step's folder is never reused.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hpcddp.errors import RequestError

STATE = "state.pt"
_MANIFEST = "manifest.json"


def write_checkpoint(folder: Path, step: int, state: dict[str, Any], facts: dict[str, Any]) -> Path:
    """Write one checkpoint in one file below `folder` and return its path; a step that is there is not written again.

    `facts` goes into the manifest for people and tools: versions, plan, samples consumed.
    """
    partial = begin(folder, step)
    if partial is None:
        return name_step(folder, step)
    files = {STATE: write_state_file(partial, state)}
    return commit(partial, files, {"step": step, **facts})


def name_step(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def begin(folder: Path, step: int) -> Path | None:
    """The temporary folder of a step's checkpoint, made anew; None if that step is there already."""
    target = name_step(folder, step)
    if target.exists():
        return None
    partial = folder / f"{target.name}.tmp-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed process that had the same number
    partial.mkdir(parents=True)
    return partial


def write_state_file(partial: Path, state: Any) -> dict[str, Any]:
    """Write `state.pt`, durably; returns what the manifest says of it."""
    with (partial / STATE).open("wb") as file:
        torch.save(state, file)
        os.fsync(file.fileno())
    return describe_file(partial / STATE)


def describe_file(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": _hash_file(path)}


def commit(partial: Path, files: Mapping[str, dict[str, Any]], facts: Mapping[str, Any]) -> Path:
    """Write the manifest of a temporary folder whose files are written and durable, and give it its name."""
    with (partial / _MANIFEST).open("w") as file:
        json.dump({"schema": 1, "files": files, **facts}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    flush_folder(partial)
    target = partial.with_name(partial.name.partition(".tmp-")[0])
    partial.rename(target)
    flush_folder(partial.parent)
    return target


def find_newest(folder: Path) -> tuple[Path | None, dict[Path, str]]:
    """The newest checkpoint that verifies, and what is wrong with each newer one."""
    damaged: dict[Path, str] = {}
    for path in reversed(list_checkpoints(folder)):
        fault = find_fault(path)
        if fault is None:
            return path, damaged
        damaged[path] = fault
    return None, damaged


def list_checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoint folders, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdigit())


def find_fault(path: Path, nth: int = 0, parts: int = 1) -> str | None:
    """What is wrong with a checkpoint by its manifest, or None. Of its files the nth of every `parts` is read."""
    try:
        files = read_manifest(path)["files"]
        for name in sorted(files)[nth::parts]:
            if (size := (path / name).stat().st_size) != files[name]["bytes"]:
                return f"{name} has {size} bytes, the manifest says {files[name]['bytes']}"
            if _hash_file(path / name) != files[name]["sha256"]:
                return f"{name} does not have the SHA-256 of the manifest"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def read_manifest(path: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((path / _MANIFEST).read_text())
    return manifest


def set_aside(path: Path) -> None:
    """Rename a damaged checkpoint, so that its step can be written again."""
    path.rename(path.with_name(f"{path.name}.damaged-{os.getpid()}"))


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The state, on the CPU; of a split checkpoint its outline. Nothing but tensors and plain values is unpickled."""
    try:
        state: dict[str, Any] = torch.load(path / STATE, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise RequestError(
            f"checkpoint {path} holds more than tensors and plain values: {error}",
            "start with --no-resume, and give rt.track() only objects whose state_dict() is tensors and plain values",
        ) from error
    return state


def remove_old(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints, and what killed writers left; a new one must be there first.

    No other checkpoint of this run may be in writing.
    """
    for path in list_checkpoints(folder)[:-keep]:
        path.rename(path.with_name(f"{path.name}.old-{os.getpid()}"))  # first, or a kill would leave half a checkpoint
    for pattern in ("step-*.old-*", "step-*.tmp-*"):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def flush_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
        return digest.hexdigest()
