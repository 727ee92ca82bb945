"""What `manifest.json` says of a checkpoint: its files with their sizes and SHA-256 sums, its form, its settings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hpcddp.errors import RequestError
from hpcddp.runs.folder import MANIFEST
from hpcddp.runs.jsonfile import DamagedFileError, read_object
from hpcddp.training.checkpoint.provenance import Provenance

STATE = "state.pt"
INDEX = ".metadata"  # of the tensors in a checkpoint that all ranks wrote


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint; what resuming reads in it has the form in which hpcddp writes it.

    FileNotFoundError if there is none; SchemaError if another hpcddp wrote it; DamagedFileError. RequestError if a
    framework wrote the checkpoint.
    """
    manifest = read_object(os.path.join(path, MANIFEST))
    if manifest is None:
        raise FileNotFoundError(f"no {MANIFEST}")
    if "framework" in manifest:  # it is whole, so it is no damaged one that may be set aside
        raise RequestError(
            f"checkpoint {path} was written by {manifest['framework']}, not by hpcddp.runtime",
            "begin a new run: --fresh",
        )
    fault = _find_fault(manifest)
    if fault is not None:
        file = os.path.join(path, MANIFEST)
        raise DamagedFileError(f"its {MANIFEST} {fault}", f"look at it: head {file}")
    return manifest


def _find_fault(manifest: dict[str, Any]) -> str | None:
    """What is wrong with it, or None. `exact` is absent in a run that is not. `asked`: the settings of the
    script, where others are in force."""
    files, form = manifest.get("files"), manifest.get("form")
    if not isinstance(files, dict) or not all(_has(about, bytes=int, sha256=str) for about in files.values()):
        return "does not give the size and SHA-256 of its files"
    if not isinstance(form, str):
        return "does not say the form of the checkpoint"
    for name in (STATE,) if form == "single" else (STATE, INDEX):
        if name not in files:
            return f"lists no {name}"
    for settings in (manifest.get("settings"), manifest.get("asked", {})):
        if not isinstance(settings, dict) or not all(isinstance(values, dict) for values in settings.values()):
            return "does not give the settings of each object"
    objects = manifest.get("objects")
    if not isinstance(objects, dict) or not all(isinstance(about, dict) for about in objects.values()):
        return "does not describe each of the objects"
    groups = manifest.get("parameter_groups")
    if not isinstance(groups, dict) or not all(map(_are_groups, groups.values())):
        return "does not give the count and the SHA-256 of the parameters of each parameter_groups entry"
    data = manifest.get("data", {"sha256": "", "means": []})
    if not _is_outline(data) or not _is_outline(data.get("rows", data)):
        return "does not give the hash and the means of the data's samples"
    kinds: dict[str, type] = {"method": str, "slices": int, "global_batch": int, "conditions": dict, "deviations": list}
    if "exact" in manifest and not _has(manifest["exact"], **kinds):
        return f"does not give what an exact run needs: {', '.join(Provenance._fields)}"
    return None


def _is_outline(data: Any) -> bool:
    return _has(data, sha256=str, means=list) and all(isinstance(mean, int | float) for mean in data["means"])


def _are_groups(groups: Any) -> bool:
    return isinstance(groups, list) and all(_has(group, parameters=int, sha256=str) for group in groups)


def _has(about: Any, **kinds: type) -> bool:
    return isinstance(about, dict) and all(isinstance(about.get(name), kind) for name, kind in kinds.items())
