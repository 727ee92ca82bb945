"""The error of the first rank that fails is on the job's own output, under a real mpirun."""

from __future__ import annotations

import sys

import pytest

pytestmark = pytest.mark.multirank
RAISE = "import os, signal, sys\nif os.environ['RANK'] in sys.argv[1]: raise ValueError('bad thing')\nsignal.pause()\n"
LAUNCH = ["hpcddp", "launch", "--here", "--name", "x", "--ranks-per-node", "3", "--"]


def test_the_text_of_a_rank_that_raises_is_there_once_with_rank_and_host(run, tmp_path):
    (tmp_path / "train.py").write_text(RAISE)
    done = run([*LAUNCH, sys.executable, "train.py", "1"], cwd=tmp_path)
    assert done.returncode == 1
    (log,) = tmp_path.glob("runs/x/attempts/*/logs/rank-0001.*.log")
    assert done.stderr.count("hpcddp: rank ") == 1
    assert f"hpcddp: rank 1 on {log.name.split('.')[1]} ended with status 1. The end of its output:" in done.stderr
    assert done.stderr.count("    ValueError: bad thing\n") == 1
    assert f"  all of it: {log}\n" in done.stderr
    assert "ValueError: bad thing" in log.read_text()
