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

# What timeout does, not after some seconds but when both ranks are there. (That a rendered script calls the real one
# rightly is shown in unit/script/test_programs.py, and together with real ranks in tests/cluster.)
_TIMEOUT = f"""#!{sys.executable}
import os, signal, subprocess, sys, time
assert sys.argv[1:4] == ["--preserve-status", "--foreground", "--signal=USR1"]
assert 0 < int(sys.argv[4]) <= 3480
launcher = subprocess.Popen(sys.argv[5:])
while launcher.poll() is None and not all(os.path.exists(name) for name in ("here-0", "here-1")):
    time.sleep(0.05)
launcher.send_signal(signal.SIGUSR1)
sys.exit(launcher.wait())
"""


def test_files_are_staged_the_ranks_are_warned_and_their_status_is_kept(run, tmp_path):
    (tmp_path / "train.py").write_text(_PROGRAM)
    (tmp_path / "in put").write_text("the data")
    request = ["--site", "local", "--ranks-per-node", "2", "--walltime", "1:00:00", "--set", "signal=0:02:00"]
    request += ["--set", "stage_in='in put'", "--set", f"stage_dir={tmp_path}/own disk"]
    done = run(["hpcddp", "render", *request, "--", sys.executable, "train.py"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/timeout").write_text(_TIMEOUT)
    (tmp_path / "bin/timeout").chmod(0o755)
    path = f"{tmp_path}/bin:{Path(sys.executable).parent}:/usr/bin:/bin"
    job = run(["bash"], stdin=done.stdout, cwd=tmp_path, env={"PATH": path})
    assert job.returncode == 5, job.stdout + job.stderr
    (of_rank_0,) = tmp_path.glob("runs/train/attempts/*/logs/job.log")
    (of_rank_1,) = tmp_path.glob("runs/train/attempts/*/logs/rank-0001.*.log")
    assert "the data" in of_rank_0.read_text().splitlines()  # a line of its own: the report of rank 1 is indented
    assert of_rank_1.read_text().splitlines() == ["the data"]
