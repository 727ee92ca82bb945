"""The verbs of docs/jobs.md on a real PBS: they run where its `qsub` is on PATH, and say so elsewhere."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
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
ENDS = ("failed", "finished", "unfinished", "cancelled")


def hpcddp(folder: Path, *words: str) -> str:
    line = [sys.executable, "-m", "hpcddp", *words]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def status(folder: Path, run: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(hpcddp(folder, "status", "--json", run))["runs"][0]
    return found


def until(folder: Path, run: str, *states: str, is_begun: bool = False) -> dict[str, Any]:
    """The status of the run once it has one of these states; `is_begun`: once its program has begun."""
    end = time.monotonic() + PATIENCE_S
    while (found := status(folder, run))["state"] not in states and not (is_begun and (folder / "here").exists()):
        assert time.monotonic() < end, found
        time.sleep(0.5)
    assert not is_begun or (folder / "here").exists(), found
    return found


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that the nodes see, of each test its own: PBS may still write a job's output to it after the test."""
    folder = Path(tempfile.mkdtemp(prefix="hpcddp-pbs-tests-", dir=Path.home()))
    yield folder
    for run in (folder / "runs").glob("*"):
        subprocess.run([sys.executable, "-m", "hpcddp", "cancel", str(run), "--now"], cwd=folder, check=False)
    shutil.rmtree(folder, ignore_errors=True)


def test_a_job_is_submitted_shown_read_and_ended(shared: Path) -> None:
    job = hpcddp(shared, "submit", *ASKED, "--name", "a", "--", "python", "-c", WAITS).strip()
    running = until(shared, "a", "running", *ENDS)
    assert (running["state"], running["job"]) == ("running", job)
    until(shared, "a", *ENDS, is_begun=True)
    hpcddp(shared, "cancel", "a")
    assert until(shared, "a", *ENDS)["state"] == "cancelled"  # SIGTERM ends Python


def test_a_sweep_is_one_array_and_a_dependent_waits(shared: Path) -> None:
    hpcddp(shared, "submit", *ASKED, "--name", "s", "--set", "sweep.x=1,2", "--", "python", "-c", "print('x')", "{x}")
    hpcddp(shared, "submit", *ASKED, "--name", "b", "--after", "afterany:s", "--", "python", "-c", "print('b')")
    assert until(shared, "s", *ENDS)["state"] == "finished"
    assert until(shared, "b", *ENDS)["state"] == "finished"
    assert "b\n" in hpcddp(shared, "logs", "b")


def test_a_job_that_is_run_again_is_what_qstat_says(shared: Path) -> None:
    words = ["--name", "a", "--set", "requeue=true", "--", "python", "-c", WAITS]
    job = hpcddp(shared, "submit", *ASKED, *words).strip()
    until(shared, "a", *ENDS, is_begun=True)
    (shared / "here").unlink()
    if subprocess.run(["qrerun", job], check=False).returncode:
        pytest.skip("this user may not run jobs again")
    until(shared, "a", *ENDS, is_begun=True)
    assert (status(shared, "a")["state"], status(shared, "a")["job"]) == ("running", job)
    hpcddp(shared, "cancel", "a")
    assert until(shared, "a", *ENDS)["state"] == "cancelled"
