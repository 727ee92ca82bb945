"""Checkpoint folders that are either complete or not there.

`step-00001200/` holds `state.pt`, one more file per rank in a sharded checkpoint, and `manifest.json` with sizes and
SHA-256 sums of all files. It is written under another name, flushed to disk file by file, and then renamed: a kill at
any moment leaves the older checkpoints as they were. The folder of a step is never written twice.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpcddp.errors import LaunchError, RequestError
from hpcddp.runs import folder as folders
from hpcddp.runs.folder import MANIFEST
from hpcddp.runs.jsonfile import DamagedFileError, UnreadableFileError, read_first_line, write_object
from hpcddp.runs.state import read_manifest
from hpcddp.training.activity import at_files
from hpcddp.training.checkpoint.tracked import gather_whole, map_tensors, module_state
from hpcddp.training.collectives import broadcast
from hpcddp.training.options import Exactness
from hpcddp.training.rendezvous.group import Group
from hpcddp.training.torch_compat import is_failed_write
from hpcddp.training.versions import list_conditions, name_differences

STATE = "state.pt"
INDEX = ".metadata"  # of the tensors in a checkpoint that all ranks wrote
MARK = "hpcddp-run"  # in a folder that a framework has saved to: whose the newest files there are


def make_provenance(exactness: Exactness, global_batch: int, device: torch.device) -> dict[str, Any]:
    """The entry `exact` of a manifest, carried from attempt to attempt: the sums that were chosen, the hardware and
    software that compute them, and what changed on the way, so that the result may differ from that of a run without
    interruption."""
    chosen = {"method": exactness.method, "slices": exactness.slices, "global_batch": global_batch}
    return {**chosen, "conditions": list_conditions(device), "deviations": []}


def continue_provenance(mine: dict[str, Any], theirs: dict[str, Any] | None, step: int) -> dict[str, Any]:
    """The provenance of this attempt, which resumes from a checkpoint with the other one."""
    if theirs is None:
        return {**mine, "deviations": [f"steps 1 to {step} were not exact"]}
    before, now = (
        {name: one[name] for name in ("method", "slices", "global_batch")} | one["conditions"] for one in (theirs, mine)
    )
    new = [f"after step {step}, {words}" for words in name_differences(before, now)]
    return {**mine, "deviations": [*theirs["deviations"], *new]}


# ---- the files of a checkpoint


def name_step(folder: Path, step: int) -> Path:
    return Path(folders.name_checkpoint(str(folder), step))


@at_files()
def begin_checkpoint(folder: Path, step: int) -> Path | None:
    """Make the temporary folder of a step's checkpoint; None if that step is there already."""
    target = name_step(folder, step)
    if target.exists():
        return None
    partial = folder / f"{target.name}.tmp-{os.uname().nodename}.{os.getpid()}"  # no other living process's
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed one that had the same number
    partial.mkdir(parents=True)
    return partial


@at_files()
def write_state_file(partial: Path, state: Any) -> dict[str, Any]:
    """Write `state.pt`, durably; returns what the manifest says of it."""
    with (partial / STATE).open("wb") as file:
        torch.save(state, file)
        os.fsync(file.fileno())
    return describe_file(partial / STATE)


@at_files()
def describe_file(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": _hash_file(path)}


@at_files()
def commit(partial: Path, files: Mapping[str, dict[str, Any]], entries: Mapping[str, Any]) -> Path:
    """Write the manifest of a temporary folder whose files are written and durable, and give it its name."""
    write_object(os.path.join(partial, MANIFEST), {"files": files, **entries}, durable=True)
    flush_folder(partial)
    target = partial.with_name(partial.name.partition(".tmp-")[0])
    partial.rename(target)
    flush_folder(partial.parent)
    return target


def list_checkpoint_folders(folder: Path) -> list[Path]:
    """List finished checkpoint folders, oldest first."""
    return [Path(path) for path in folders.list_checkpoints(str(folder))]


@at_files()
def find_fault(path: Path, nth: int = 0, parts: int = 1, framework: str | None = None) -> str | None:
    """Check a checkpoint by its manifest: the fault, or None. Of its files the nth of every `parts` is read.

    SchemaError if another hpcddp wrote it, RequestError if not this `framework` did (None: hpcddp.runtime): it is
    whole, but not for this run. OSError or UnreadableFileError if the system does not let a file be read.
    """
    try:
        manifest = read_manifest(str(path))
    except UnreadableFileError:
        raise
    except DamagedFileError as error:
        return error.message
    if manifest is None or manifest.files is None:
        return f"no complete {MANIFEST}"
    if manifest.framework != framework:
        writer, reader = manifest.framework or "hpcddp.runtime", framework or "hpcddp.runtime"
        raise RequestError(
            f"checkpoint {path} was written by {writer}, not by {reader}",
            "begin a new run: --fresh in a job, else another run_dir",
        )
    folder = Path(manifest.path or path)
    for name in sorted(manifest.files)[nth::parts]:
        about = manifest.files[name]
        try:
            if (size := (folder / name).stat().st_size) != about["bytes"]:
                return f"{name} has {size} bytes, the manifest says {about['bytes']}"
            if "sha256" in about and _hash_file(folder / name) != about["sha256"]:
                return f"{name} does not have the SHA-256 of the manifest"
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            return f"{name}: {(error.strerror or str(error)).lower()}"
    if manifest.mark is not None and read_first_line(str(folder / MARK)) != manifest.mark:
        return f"{folder} was written over by another run"
    return None


@at_files()
def read_checkpoint(path: Path) -> dict[str, Any]:
    """The state, on the CPU; of a sharded checkpoint its outline. Nothing but tensors and plain values is unpickled."""
    state: dict[str, Any] = torch.load(path / STATE, map_location="cpu", weights_only=True)
    return state


@at_files()
def remove_old(folder: Path, keep: int, best: int | None = None) -> None:
    """Remove all but the newest `keep` checkpoints and the one of step `best`, and what killed writers left.

    A new one must be there first, and no other of this run in writing.
    """
    for path in list_checkpoint_folders(folder)[:-keep]:
        if best is not None and path == name_step(folder, best):
            continue
        path.rename(path.with_name(f"{path.name}.old-{os.getpid()}"))  # first, or a kill would leave half a checkpoint
    for pattern in ("step-*.old-*", "step-*.tmp-*"):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


@at_files()
def flush_folder(path: Path) -> None:
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


# ---- a model's weights


def write_whole(model: nn.Module, path: Path, group: Group) -> None:
    """Write the state of `model` (not in DDP), whole and on the CPU, as a file that plain torch reads: rank 0 does. A
    collective.

    LaunchError on every rank if the file cannot be written.
    """
    tree = gather_whole(module_state(model), keep=group.is_first)
    failure = broadcast(_write(tree, path) if group.is_first else None, group.world_size, group.device)
    if failure is not None:
        raise LaunchError(
            f"the model cannot be written to {path}: {failure}", "rt.save_model(path that can be written)"
        )


@at_files()
def _write(tree: object, path: Path) -> str | None:
    """Write the file; returns what prevented it, or None."""
    partial = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            torch.save(map_tensors(tree, lambda _, tensor: tensor.detach().cpu()), file)
            os.fsync(file.fileno())
        partial.replace(path)
    except (OSError, RuntimeError) as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            return (error.strerror or str(error)).lower()
        if not is_failed_write(error):
            raise
        return f"torch could not write all of it ({error})"
    return None
