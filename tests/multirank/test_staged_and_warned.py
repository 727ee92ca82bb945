"""A rendered script under a real mpirun: files come before the ranks, a warning reaches them, their status stays."""

from __future__ import annotations

import sys

import pytest

pytestmark = pytest.mark.multirank

_PROGRAM = """\
import os, signal, sys, time
warned = []
signal.signal(signal.SIGUSR1, lambda *_: warned.append(True))
print(open(os.environ["HPCDDP_STAGED"] + "/in put").read(), flush=True)
end = time.time() + 30
while not warned and time.time() < end:
    time.sleep(0.05)
sys.exit(5 if warned else 1)
"""


def test_files_are_staged_the_ranks_are_warned_and_their_status_is_kept(run, tmp_path):
    (tmp_path / "train.py").write_text(_PROGRAM)
    (tmp_path / "in put").write_text("the data")
    request = ["--site", "local", "--ranks-per-node", "2", "--walltime", "0:00:30", "--set", "signal=0:00:22"]
    request += ["--set", "stage_in='in put'", "--set", f"stage_dir={tmp_path}/own disk"]
    done = run(["hpcddp", "render", *request, "--", sys.executable, "train.py"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    job = run(["bash"], stdin=done.stdout, cwd=tmp_path)
    assert job.returncode == 5, job.stdout + job.stderr
    logs = [path.read_text() for path in tmp_path.glob("runs/train/attempts/*/logs/*.log")]
    assert sum(text.count("the data") for text in logs) == 2
