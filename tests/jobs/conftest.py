"""A copy of a job's folder, and its job rendered and run as a user would: `hpcddp render … | bash`."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from hpcddp.script.site_file import load_yaml
from tests.jobs.rows import JOBS, Row

ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.geteuid() == 0 else {}


# .venv's mpirun, for the frameworks' environment too
ENVIRONMENT = {"PATH": f"{Path(sys.executable).parent}:{JOBS.parent}/.venv/bin:/usr/local/bin:/usr/bin:/bin", **ROOT}
Done = subprocess.CompletedProcess[str]


class Folder(NamedTuple):
    """A user's copy of a job's folder."""

    path: Path
    row: Row
    run: Callable[..., Done]

    def render_and_run(self, ranks: int, *options: str, command: str = "", add: str = "") -> Done:
        """`hpcddp render JOB --site local --ranks-per-node RANKS -- COMMAND ADD | bash`; without COMMAND, the row's."""
        job = Path(self.row.job).name
        words = (command or self.row.command).split() or load_yaml(str(self.path / job))[0]["command"]
        size = ["--site", "local", "--nodes", "1", "--ranks-per-node", str(ranks)]
        size += (self.row.alone if ranks == 1 else self.row.together).split()
        gpus = ["--gpus-per-node", str(ranks * self.row.gpus)] if self.row.gpus else []
        size += gpus
        render = [sys.executable, "-m", "hpcddp", "render", job, *size, *options, "--", *words, *add.split()]
        script = self.run(render, cwd=self.path, env=ENVIRONMENT)
        assert script.returncode == 0, script.stderr
        text = script.stdout.replace(f" {' '.join(gpus)} -- ", " -- ") if gpus else script.stdout  # CPUs stand in
        return self.run(["bash"], stdin=text, cwd=self.path, env=ENVIRONMENT)

    def state(self) -> dict[str, object]:
        """state.json of its one run."""
        (found,) = self.path.glob("runs/*/state.json")
        return json.loads(found.read_text())

    def weights(self) -> dict[str, object]:
        import torch

        return torch.load(self.path / "model.pt", weights_only=True)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def user_folder(run, tmp_path, images) -> Callable[[Row, str], Folder]:
    """Makes a copy of a row's folder in a new folder of this name, with a folder of images in it."""

    def copy(row: Row, name: str) -> Folder:
        path = tmp_path / name
        shutil.copytree((JOBS / row.job).parent, path, ignore=shutil.ignore_patterns("__pycache__"))
        (path / "images").symlink_to(images)
        if "A5" in row.lint:  # a fixed port; another test's program may have it
            program = path / f"{Path(row.job).stem}.py"
            program.write_text(program.read_text().replace("12355", str(free_port())))
        return Folder(path, row, run)

    return copy


@pytest.fixture(scope="session")
def images(tmp_path_factory) -> Path:
    """What jobs/make_images.py writes."""
    folder = tmp_path_factory.mktemp("jobs") / "images"
    subprocess.run([sys.executable, JOBS / "make_images.py", folder], check=True)
    return folder
