"""Checkpoint folders that are either whole or not there.

`step-00001200/` holds `state.pt` and `manifest.json` with sizes and SHA-256 sums. It is written under another name,
made durable file by file, and renamed: a kill at any moment leaves the older checkpoints as they were. A step's folder
is never reused.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import torch

from hpcddp.errors import RequestError

_STATE = "state.pt"
_MANIFEST = "manifest.json"


def write_checkpoint(folder: Path, step: int, state: dict[str, Any], facts: dict[str, Any]) -> Path:
    """Write one checkpoint below `folder` and return its path; if that step is there already, nothing is written.

    `facts` goes into the manifest for people and tools: versions, plan, samples consumed.
    """
    target = folder / f"step-{step:08d}"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{target.name}.tmp-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed process that had the same number
    partial.mkdir()
    with (partial / _STATE).open("wb") as file:
        torch.save(state, file)
        os.fsync(file.fileno())
    files = {_STATE: {"bytes": (partial / _STATE).stat().st_size, "sha256": _hash_file(partial / _STATE)}}
    with (partial / _MANIFEST).open("w") as file:
        json.dump({"schema": 1, "step": step, "files": files, **facts}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _flush_folder(partial)
    partial.rename(target)
    _flush_folder(folder)
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


def find_fault(path: Path) -> str | None:
    """What is wrong with a checkpoint by its manifest, or None."""
    try:
        manifest = json.loads((path / _MANIFEST).read_text())
        for name, expected in manifest["files"].items():
            if (size := (path / name).stat().st_size) != expected["bytes"]:
                return f"{name} has {size} bytes, the manifest says {expected['bytes']}"
            if _hash_file(path / name) != expected["sha256"]:
                return f"{name} does not have the SHA-256 of the manifest"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def set_aside(path: Path) -> None:
    """Rename a damaged checkpoint, so that its step can be written again."""
    path.rename(path.with_name(f"{path.name}.damaged-{os.getpid()}"))


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The state, on the CPU. Nothing but tensors and plain values is unpickled."""
    try:
        state: dict[str, Any] = torch.load(path / _STATE, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise RequestError(
            f"checkpoint {path} holds more than tensors and plain values: {error}",
            "start with --no-resume, and give rt.track() only objects whose state_dict() is tensors and plain values",
        ) from error
    return state


def remove_old(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints, and what killed writers left; a new one must be there first."""
    for path in list_checkpoints(folder)[:-keep]:
        path.rename(path.with_name(f"{path.name}.old-{os.getpid()}"))  # first, or a kill would leave half a checkpoint
    for pattern in ("step-*.old-*", "step-*.tmp-*"):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
        return digest.hexdigest()


def _flush_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
