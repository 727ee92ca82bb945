"""The files of a run, as far as the ranks write them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcddp.errors import LaunchError, RequestError


@dataclass(frozen=True, slots=True)
class RunFolder:
    """`runs/<name>` and this attempt's part of it."""

    path: Path
    attempt: str

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def attempt_path(self) -> Path:
        return self.path / "attempts" / self.attempt

    @property
    def state(self) -> Path:
        return self.path / "state.json"

    @property
    def metrics(self) -> Path:
        return self.attempt_path / "metrics.jsonl"


def find_run_folder(env: Mapping[str, str], run_dir: str | None) -> RunFolder | None:
    """The given folder, or else HPCDDP_RUN_DIR; None if neither is there, and then nothing is written."""
    path = run_dir or env.get("HPCDDP_RUN_DIR")
    if not path:
        return None
    attempt = env.get("HPCDDP_ATTEMPT") or f"local-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}"
    return RunFolder(Path(path).absolute(), attempt)


def read_planned_batch(folder: RunFolder | None) -> int | None:
    """The global batch of the job plan that the script left in the run folder."""
    if folder is None or not (folder.path / "plan.json").exists():
        return None
    path = folder.path / "plan.json"
    try:
        planned = json.loads(path.read_text()).get("global_batch")
        return int(planned) if planned is not None else None
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise RequestError(
            f"{path} cannot be read as a job plan: {error}", "render the job again, or remove it"
        ) from error


def open_run_folder(folder: RunFolder) -> None:
    """Make the attempt's folder. LaunchError if that cannot be."""
    try:
        folder.attempt_path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(
            f"the run folder {folder.path} cannot be written: {(error.strerror or str(error)).lower()}",
            "choose one that every node can write: --run-dir, or run_dir in the job file",
        ) from error


def write_state(folder: RunFolder, status: str, *, step: int, epoch: int, reason: str, **more: Any) -> None:
    """`state.json`: continue | finished | failed. Chained jobs read it, since launchers replace exit codes."""
    state = {"status": status, "step": step, "epoch": epoch, "reason": reason, "attempt": folder.attempt, **more}
    write_json(folder.state, state | {"written_at": time.strftime("%Y-%m-%dT%H:%M:%S%z")})


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a small file so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)
