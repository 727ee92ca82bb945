"""`hpcddp.init()` over several hosts where no variable tells where rank 0 is; ranks that leave early harm nobody."""

from __future__ import annotations

from pathlib import Path

import pytest
from livecluster import HERE, MEETING, PYTHON, Cluster, assert_met
from mpis import find_mpi

pytestmark = pytest.mark.cluster

HOSTS = {"node2": 1, "node1": 2}  # rank 0 is not on the first host by name


# openmpi4 in short: test_ipv6.py, impi: test_two_networks.py
@pytest.mark.parametrize("name", ["openmpi5", "mpich", pytest.param("openmpi4", marks=pytest.mark.slow)])
def test_a_file_in_the_run_folder_tells_it(cluster: Cluster, shared: Path, name: str) -> None:
    mpi = find_mpi(name)
    run = ["env", f"HPCDDP_RUN_DIR={shared}/run", "HPCDDP_ATTEMPT=local-1"]
    ranks = assert_met(cluster, [*mpi.over_hosts(HOSTS, 3, shared), *run, *MEETING], 3, cwd=shared, env=mpi.env)
    assert {rank["channel"] for rank in ranks} == {"file"}
    first = next(rank["host"] for rank in ranks if rank["rank"] == 0)
    assert {rank["address"] for rank in ranks} == {first}
    assert not list(shared.glob("run/rendezvous/*")), "the file is taken away when all have come"


def test_ranks_that_slurm_placed_at_will_meet_through_the_run_folder(cluster: Cluster, shared: Path) -> None:
    (shared / "hosts").write_text("node3\nnode1\nnode2\n")
    env = {"SLURM_HOSTFILE": str(shared / "hosts"), "HPCDDP_RUN_DIR": str(shared / "run")}
    srun = ["srun", "--distribution=arbitrary", "-n3"]
    said = cluster.ok([*srun, "hpcddp", "exec", "--", PYTHON, f"{HERE}/programs/meet.py"], cwd=shared, env=env)
    assert said.strip() == "met: 0@node3 1@node1 2@node2"
    ranks = assert_met(cluster, [*srun, *MEETING], 3, cwd=shared, env=env)
    assert {(rank["channel"], rank["address"]) for rank in ranks} == {("file", "node3")}
