"""Checkpoint folders that are either complete or not there.

`step-00001200/` holds `state.pt`, one more file per rank in a sharded checkpoint, and `manifest.json` with sizes and
SHA-256 sums of all files. It is written under another name, flushed to disk file by file, and then renamed: a kill at
any moment leaves the older checkpoints as they were. The folder of a step is never written twice.
"""

from __future__ import annotations

import errno
import hashlib
import os
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hpcddp.errors import RequestError
from hpcddp.runs import folder as folders
from hpcddp.runs.folder import MANIFEST
from hpcddp.runs.jsonfile import DamagedFileError, UnreadableFileError, write_object
from hpcddp.runs.state import Manifest, read_manifest
from hpcddp.training.activity import at_files
from hpcddp.training.options import ANEW, Exactness
from hpcddp.training.versions import list_conditions, name_differences

# What an exact result was computed with. A checkpoint's manifest carries it from attempt to attempt.


class Provenance(NamedTuple):
    """The sums that were chosen, the hardware and software that computed them, and what changed on the way."""

    method: str
    slices: int
    global_batch: int
    conditions: dict[str, Any]
    deviations: tuple[str, ...]  # why the result may differ from that of a run without interruption


def make_provenance(exactness: Exactness, global_batch: int, device: torch.device) -> Provenance:
    """The provenance of a run that starts here."""
    return Provenance(exactness.method, exactness.slices, global_batch, list_conditions(device), ())


def continue_provenance(mine: Provenance, manifest: Manifest, step: int) -> Provenance:
    """The provenance of this attempt, which resumes from a checkpoint with this manifest. A difference, accepted by the
    user or in hardware or software, becomes a deviation.
    """
    if manifest.exact is None:
        return mine._replace(deviations=(f"steps 1 to {step} were not exact",))
    theirs = Provenance(**{name: manifest.exact[name] for name in Provenance._fields})
    chosen = [{name: getattr(one, name) for name in ("method", "slices", "global_batch")} for one in (theirs, mine)]
    new = [
        f"after step {step}, {name.replace('_', ' ')} {old} -> {chosen[1][name]}"
        for name, old in chosen[0].items()
        if chosen[1][name] != old
    ]
    new += [f"after step {step}, {words}" for words in name_differences(theirs.conditions, mine.conditions)]
    return mine._replace(deviations=(*theirs.deviations, *new))


# What `manifest.json` says of a checkpoint: its files with their sizes and SHA-256 sums, its form.


STATE = "state.pt"
INDEX = ".metadata"  # of the tensors in a checkpoint that all ranks wrote


def check_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint; what resuming reads in it has the form in which hpcddp writes it.

    FileNotFoundError if there is none; SchemaError if another hpcddp wrote it; DamagedFileError. RequestError if a
    framework wrote the checkpoint.
    """
    manifest = read_manifest(str(path))
    if manifest is None:
        raise FileNotFoundError(f"no {MANIFEST}")
    if manifest.framework is not None:  # it is whole, so it is no damaged one that may be set aside
        raise RequestError(
            f"checkpoint {path} was written by {manifest.framework}, not by hpcddp.runtime",
            "begin a new run: --fresh in a job, else another run_dir",
        )
    if not _is_complete(manifest):
        file = os.path.join(path, MANIFEST)
        raise DamagedFileError(f"its {MANIFEST} is not as hpcddp writes it", f"look at it: head {file}")
    return manifest


def _is_complete(manifest: Manifest) -> bool:
    """Whether it has what resuming reads. `exact` is absent in a run that is not."""
    files = manifest.files or {}
    needed = (STATE,) if manifest.form == "single" else (STATE, INDEX)
    kinds: dict[str, type] = {"method": str, "slices": int, "global_batch": int, "conditions": dict, "deviations": list}
    return (
        manifest.form is not None
        and manifest.seconds is not None
        and all(_has(about, bytes=int, sha256=str) for about in files.values())
        and all(name in files for name in needed)
        and (manifest.exact is None or _has(manifest.exact, **kinds))
    )


def _has(about: Any, **kinds: type) -> bool:
    return isinstance(about, dict) and all(isinstance(about.get(name), kind) for name, kind in kinds.items())


#: There is no such file, or it is no file: that is seen wherever the checkpoint is.
_OF_NAMES = {None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP}


def name_step(folder: Path, step: int) -> Path:
    return Path(folders.name_checkpoint(str(folder), step))


@at_files()
def begin_checkpoint(folder: Path, step: int) -> Path | None:
    """The temporary folder of a step's checkpoint, made anew; None if that step is there already."""
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
    """Finished checkpoint folders, oldest first."""
    return [Path(path) for path in folders.list_checkpoints(str(folder))]


@at_files()
def find_fault(path: Path, nth: int = 0, parts: int = 1) -> str | None:
    """Check a checkpoint by its manifest: the fault, or None. Of its files the nth of every `parts` is read.

    SchemaError if another hpcddp wrote it: it is whole, but not for this one. OSError or UnreadableFileError if the
    system does not let a file be read: nobody knows then what it holds.
    """
    try:
        files = check_manifest(path).files or {}
    except UnreadableFileError:
        raise
    except DamagedFileError as error:
        return error.message
    except FileNotFoundError as error:
        return str(error)
    return find_file_fault(path, {name: files[name] for name in sorted(files)[nth::parts]})


def find_file_fault(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Check these files by a manifest, which need not have their SHA-256. OSError as of `find_fault`."""
    for name, about in files.items():
        try:
            if (size := (folder / name).stat().st_size) != about["bytes"]:
                return f"{name} has {size} bytes, the manifest says {about['bytes']}"
            if "sha256" in about and _hash_file(folder / name) != about["sha256"]:
                return f"{name} does not have the SHA-256 of the manifest"
        except (OSError, ValueError) as error:  # the second: a name that no file can have
            if getattr(error, "errno", None) not in _OF_NAMES:
                raise
            return f"{name}: {(getattr(error, 'strerror', None) or str(error)).lower()}"
    return None


@at_files()
def set_checkpoint_aside(path: Path) -> None:
    """Rename a damaged checkpoint, so that its step can be written again."""
    path.rename(path.with_name(f"{path.name}.damaged-{os.getpid()}"))


@at_files()
def read_checkpoint(path: Path, anew: str = ANEW) -> dict[str, Any]:
    """The state, on the CPU; of a sharded checkpoint its outline. Nothing but tensors and plain values is unpickled."""
    try:
        state: dict[str, Any] = torch.load(path / STATE, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise RequestError(
            f"checkpoint {path} holds more than tensors and plain values: {error}",
            f"give rt.prepare only objects whose state_dict() is tensors and plain values, and {anew}",
        ) from error
    return state


@at_files()
def remove_old(folder: Path, keep: int, best: int | None = None) -> None:
    """Remove all but the newest `keep` checkpoints and the one of step `best`, and what killed writers left.

    A new one must be there first.

    No other checkpoint of this run may be in writing.
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
