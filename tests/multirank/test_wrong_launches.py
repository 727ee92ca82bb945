"""A launch whose environment contradicts itself ends with status 4 and says why; it never becomes rank 0 of 1."""

from __future__ import annotations

import sys

import pytest

pytestmark = pytest.mark.multirank
ENV_VERB = [sys.executable, "-m", "hpcddp", "env"]


def refusals(done) -> list[str]:
    assert done.returncode == 4, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "hint: " in done.stderr
    return [line for line in done.stderr.splitlines() if line.startswith("hpcddp: ")]


def test_half_of_a_launchers_variables_is_an_error(openmpi5, run):
    done = run([*openmpi5.mpirun(2), "env", "-u", "OMPI_COMM_WORLD_SIZE", *ENV_VERB], env=openmpi5.env)
    assert "OMPI_COMM_WORLD_SIZE" in refusals(done)[0]


def test_exec_in_a_wrong_launch_does_not_run_the_command(openmpi5, run, tmp_path):
    exec_touch = [sys.executable, "-m", "hpcddp", "exec", "--", "touch", tmp_path / "ran"]
    done = run([*openmpi5.mpirun(2), "env", "-u", "OMPI_COMM_WORLD_RANK", *exec_touch], env=openmpi5.env)
    assert refusals(done)
    assert not (tmp_path / "ran").exists()
