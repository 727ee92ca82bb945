"""A rendered script under a real mpirun: files come before the ranks, a warning reaches them, their status stays."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.multirank

_PROGRAM = """\
import os, signal, sys, time
warned = []
signal.signal(signal.SIGUSR1, lambda *_: warned.append(True))
print(open(os.environ["HPCDDP_STAGED"] + "/in put").read(), flush=True)
open("here-" + os.environ["RANK"], "w").close()
end = time.time() + 600
while not warned and time.time() < end:
    time.sleep(0.05)
signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # it may come twice, and Python ends without its handler
sys.exit(5 if warned else 1)
"""

# The warning when both ranks are there. (When the supervisor sends it by itself is in unit/script/test_programs.py.)
_WARN = """\
bash job.sh &
until [ -e here-0 ] && [ -e here-1 ] || ! kill -0 $!; do sleep 0.05; done
kill -USR1 $!
wait $!
"""


def test_files_are_staged_the_ranks_are_warned_and_their_status_is_kept(run, tmp_path):
    (tmp_path / "train.py").write_text(_PROGRAM)
    (tmp_path / "in put").write_text("the data")
    staging = ["--set", "stage_in='in put'", "--set", f"stage_dir={tmp_path}/own disk"]
    request = ["--site", "local", "--ranks-per-node", "2", *staging]
    done = run(["hpcddp", "render", *request, "--", sys.executable, "train.py"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "job.sh").write_text(done.stdout)
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    job = run(["bash", "-c", _WARN], cwd=tmp_path, env={"PATH": path})
    assert job.returncode == 5, job.stdout + job.stderr
    (of_rank_0,) = tmp_path.glob("runs/train/attempts/*/logs/job.log")
    (of_rank_1,) = tmp_path.glob("runs/train/attempts/*/logs/rank-0001.*.log")
    assert "the data" in of_rank_0.read_text().splitlines()  # a line of its own: the report of rank 1 is indented
    assert of_rank_1.read_text().splitlines() == ["the data"]
