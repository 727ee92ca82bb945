"""A copy of a job's folder, and its job rendered and run as a user would: `hpcddp render … | bash`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.jobs.rows import JOBS, Row

ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.geteuid() == 0 else {}


class Folder(NamedTuple):
    """A user's copy of a job's folder."""

    path: Path
    row: Row
    run: Callable[..., subprocess.CompletedProcess[str]]

    def render_and_run(self, ranks: int, *options: str, add: str = "") -> subprocess.CompletedProcess[str]:
        """`hpcddp render JOB --site local --ranks-per-node RANKS | bash`, with the row's smaller command."""
        job, command = Path(self.row.job).name, [*self.row.command.split(), *add.split()]
        size = ["--site", "local", "--nodes", "1", "--ranks-per-node", str(ranks)]
        render = ["hpcddp", "render", job, *size, *options, *(["--", *command] if command else [])]
        script = self.run(render, cwd=self.path, env=ROOT)
        assert script.returncode == 0, script.stderr
        return self.run(["bash"], stdin=script.stdout, cwd=self.path, env=ROOT)

    def state(self) -> dict[str, object]:
        """state.json of its one run."""
        (found,) = self.path.glob("runs/*/state.json")
        return json.loads(found.read_text())

    def weights(self) -> dict[str, object]:
        import torch

        return torch.load(self.path / "model.pt", weights_only=True)


@pytest.fixture
def user_folder(run, tmp_path, images) -> Callable[[Row, str], Folder]:
    """Makes a copy of a row's folder in a new folder of this name, with a folder of images in it."""

    def copy(row: Row, name: str) -> Folder:
        path = tmp_path / name
        shutil.copytree((JOBS / row.job).parent, path, ignore=shutil.ignore_patterns("__pycache__"))
        (path / "images").symlink_to(images)
        return Folder(path, row, run)

    return copy


@pytest.fixture(scope="session")
def images(tmp_path_factory) -> Path:
    """What jobs/make_images.py writes."""
    folder = tmp_path_factory.mktemp("jobs") / "images"
    subprocess.run([sys.executable, JOBS / "make_images.py", folder], check=True)
    return folder
