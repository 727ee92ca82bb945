"""Commands that make their ranks themselves, and frameworks, are one world over several hosts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from livecluster import HERE, PYTHON, Cluster
from mpis import find_mpi

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

PROGRAMS = HERE.parent / "frameworks" / "programs"
RENDER = f"hpcddp render --site {HERE}/site.yaml --nodes 2 --ranks-per-node 2 --cpus-per-rank 1 --walltime 0:10:00"
FRAMEWORKS = HERE.parents[1] / ".frameworks" / "bin" / "python"


def assert_world(folder: Path) -> None:
    """Four ranks, which have seen each of the 48 samples once."""
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(4)]
    assert [rank["world_size"] for rank in ranks] == [4] * 4
    assert sorted(sample for rank in ranks for sample in rank["seen"]) == list(range(48))


@pytest.mark.parametrize("command", ["torchrun", "python -m torch.distributed.launch --nproc_per_node=2"])
def test_a_job_whose_command_makes_the_ranks(cluster: Cluster, shared: Path, command: str) -> None:
    line = f"{RENDER} --name own -- {command} {PROGRAMS}/plain_ddp.py {shared}"
    script = cluster.ok(["bash", "-c", line], cwd=shared)
    job = cluster.wait(cluster.submit(script, cwd=shared), cwd=shared)
    assert job.state == "COMPLETED", job.output
    assert_world(shared)


@pytest.mark.parametrize("program", ["accelerate_loop", "hf_trainer", "lightning_trainer"])
@pytest.mark.parametrize("launcher", ["srun", "openmpi4"])
def test_a_framework_is_one_world(cluster: Cluster, shared: Path, program: str, launcher: str) -> None:
    python = str(FRAMEWORKS if FRAMEWORKS.exists() else PYTHON)  # without them the program says what is missing
    rank = [python, "-m", "hpcddp", "exec", "--", python, f"{PROGRAMS}/{program}.py", str(shared)]
    if launcher == "srun":
        cluster.ok(["srun", "-N2", "--ntasks-per-node=2", "--cpus-per-task=1", *rank], cwd=shared)
    else:
        mpi = find_mpi(launcher)
        mpirun = mpi.over_hosts({"node1": 2, "node2": 2}, 4, shared)  # in no allocation: nothing names rank 0's host
        meeting = ["env", "MASTER_ADDR=node1", "MASTER_PORT=29444"]
        cluster.ok([*mpirun, *meeting, *rank], cwd=shared, env=mpi.env)
    assert_world(shared)
