"""The verbs of docs/jobs.md on a real PBS: they run where its `qsub` is on PATH, and say so elsewhere."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def _says_pbs() -> bool:
    if shutil.which("qsub") is None:
        return False
    said = subprocess.run(["qsub", "--version"], capture_output=True, text=True, check=False, timeout=60)
    return "pbs_version" in said.stdout + said.stderr


pytestmark = [
    pytest.mark.pbs,
    pytest.mark.skipif(not _says_pbs(), reason="there is no PBS on this machine"),
]

ASKED = ["--site", "generic-pbs", "--nodes", "1", "--gpus-per-node", "0", "--cpus-per-rank", "1", "--walltime", "5m"]
WAITS = "import pathlib, time\npathlib.Path('here').touch()\nwhile not pathlib.Path('go').exists(): time.sleep(0.1)"
PATIENCE_S = 600


def hpcddp(folder: Path, *words: str) -> str:
    line = [sys.executable, "-m", "hpcddp", *words]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def status(folder: Path, run: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(hpcddp(folder, "status", "--json", run))["runs"][0]
    return found


def until(folder: Path, run: str, *states: str) -> dict[str, Any]:
    end = time.monotonic() + PATIENCE_S
    while (found := status(folder, run))["state"] not in states:
        assert time.monotonic() < end, found
        time.sleep(1)
    return found


@pytest.fixture
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that the nodes see: below the home directory."""
    folder = Path.home() / f"hpcddp-pbs-tests-{tmp_path_factory.getbasetemp().name}"
    folder.mkdir()
    yield folder
    for run in (folder / "runs").glob("*"):
        subprocess.run([sys.executable, "-m", "hpcddp", "cancel", str(run), "--now"], cwd=folder, check=False)
    shutil.rmtree(folder, ignore_errors=True)


def test_a_job_is_submitted_shown_read_and_ended(shared: Path) -> None:
    job = hpcddp(shared, "submit", *ASKED, "--name", "a", "--", "python", "-c", WAITS).strip()
    running = until(shared, "a", "running", "failed", "cancelled")
    assert (running["state"], running["job"]) == ("running", job)
    end = time.monotonic() + PATIENCE_S
    while not (shared / "here").exists():
        assert time.monotonic() < end
        time.sleep(0.5)
    hpcddp(shared, "cancel", "a")
    ended = until(shared, "a", "failed", "finished", "unfinished", "cancelled")
    assert ended["state"] == "cancelled"  # SIGTERM ends Python


def test_a_sweep_is_one_array_and_a_dependent_waits(shared: Path) -> None:
    hpcddp(shared, "submit", *ASKED, "--name", "s", "--set", "sweep.x=1,2", "--", "python", "-c", "print('x')", "{x}")
    hpcddp(shared, "submit", *ASKED, "--name", "b", "--after", "afterany:s", "--", "python", "-c", "print('b')")
    assert until(shared, "s", "finished", "failed")["state"] == "finished"
    assert until(shared, "b", "finished", "failed", "cancelled")["state"] == "finished"
    assert "b\n" in hpcddp(shared, "logs", "b")


def test_a_job_that_is_run_again_is_what_qstat_says(shared: Path) -> None:
    words = ["--name", "a", "--set", "requeue=true", "--", "python", "-c", WAITS]
    job = hpcddp(shared, "submit", *ASKED, *words).strip()
    until(shared, "a", "running")
    end = time.monotonic() + PATIENCE_S
    while not (shared / "here").exists():
        assert time.monotonic() < end
        time.sleep(0.5)
    (shared / "here").unlink()
    if subprocess.run(["qrerun", job], check=False).returncode:
        pytest.skip("this user may not run jobs again")
    while not (shared / "here").exists():
        assert status(shared, "a")["state"] in {"queued", "running", "exiting"}
        assert time.monotonic() < end
        time.sleep(0.5)
    assert (status(shared, "a")["state"], status(shared, "a")["job"]) == ("running", job)
    again = [sys.executable, "-m", "hpcddp", "submit", *ASKED, *words]
    assert subprocess.run(again, cwd=shared, capture_output=True, check=False).returncode == 2
    hpcddp(shared, "cancel", "a")
    assert until(shared, "a", "failed", "finished", "unfinished", "cancelled")["state"] == "cancelled"
