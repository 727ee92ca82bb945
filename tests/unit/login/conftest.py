"""Stand-ins for a scheduler's commands, which keep what they were given; jobs in the background of this machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

JOB = ["--site", "local", "--ranks-per-node", "1"]
SLURM = ["--site", "generic-slurm", "--gpus-per-node", "0", "--set", "cpus_per_node=2", "--walltime", "10m"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, and no job around this process."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "PBS_", "HPCDDP_", "OMPI_", "PMI_")):
            monkeypatch.delenv(name)
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Put a stand-in of that name first on PATH; its script is sh's."""
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    monkeypatch.setenv("PATH", f"{bin_}:{os.environ['PATH']}")

    def make(name: str, script: str) -> None:
        path = bin_ / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    return make
