"""The error of the first rank that fails is on the job's own output, under a real mpirun."""

from __future__ import annotations

import sys

import pytest

pytestmark = pytest.mark.multirank
RAISE = "import os, signal\nif os.environ['RANK'] in FAIL: raise ValueError('bad thing')\nsignal.pause()"


@pytest.fixture
def patient_exec(programs):
    return [sys.executable, programs / "patient_exec.py", "exec", "--"]


@pytest.fixture
def env(openmpi5, tmp_path):
    return openmpi5.env | {"HPCDDP_RUN_DIR": str(tmp_path), "HPCDDP_ATTEMPT": "7.job", "HPCDDP_LOG_RANKS": "1"}


def test_the_text_of_a_rank_that_raises_is_there_once_with_rank_and_host(openmpi5, run, env, patient_exec, tmp_path):
    done = run([*openmpi5.mpirun(3), *patient_exec, sys.executable, "-c", RAISE.replace("FAIL", "'1'")], env=env)
    assert done.returncode == 1
    (log,) = (tmp_path / "attempts/7.job/logs").glob("rank-0001.*.log")
    host = log.name.split(".")[1]
    assert done.stderr.count("hpcddp: rank ") == 1
    assert f"hpcddp: rank 1 on {host}" in done.stderr
    assert done.stderr.count("    ValueError: bad thing\n") == 1
    assert f"  all of it: {log}\n" in done.stderr
    assert "ValueError: bad thing" in log.read_text()


@pytest.mark.slow
def test_of_all_ranks_that_fail_one_is_reported(openmpi5, run, env, patient_exec):
    done = run([*openmpi5.mpirun(2), *patient_exec, sys.executable, "-c", RAISE.replace("FAIL", "'01'")], env=env)
    assert done.returncode == 1
    assert done.stderr.count("hpcddp: rank ") == 1


@pytest.mark.slow
def test_the_status_of_a_rank_that_was_killed_is_the_launchers_own(openmpi5, run, env, patient_exec):
    done = run(
        [*openmpi5.mpirun(2), *patient_exec, "sh", "-c", 'if [ "$RANK" = 1 ]; then kill -9 $$; fi; sleep 600'], env=env
    )
    assert done.returncode == 137
    assert "was killed by SIGKILL (often: out of memory) and wrote nothing" in done.stderr
