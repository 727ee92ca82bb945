"""A plain torch script (`env://`), started by `hpcddp exec` under a real mpirun, trains as one process would."""

from __future__ import annotations

import json
import sys

import pytest

pytestmark = pytest.mark.multirank
EXEC = [sys.executable, "-m", "hpcddp", "exec", "--"]


def check_gradients(folder, ranks):
    for rank in range(ranks):
        report = json.loads((folder / f"rank-{rank}.json").read_text())
        assert report["world_size"] == ranks
        assert report["sum"] == ranks * (ranks + 1) / 2
        assert report["difference"] < 1e-15


@pytest.mark.slow
def test_gradients_equal_one_process_on_the_global_batch(flavour, run, programs, tmp_path):
    gradients = [*EXEC, sys.executable, programs / "gradients.py", tmp_path]
    done = run([*flavour.mpirun(2), *gradients], env=flavour.env | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    check_gradients(tmp_path, 2)


@pytest.mark.parametrize("status", [0, 3])
def test_the_commands_status_is_the_launchers(openmpi5, status, run):
    done = run([*openmpi5.mpirun(2), *EXEC, "sh", "-c", f"exit {status}"], env=openmpi5.env)
    assert done.returncode == status
