"""Hosts that have only IPv6 addresses. (Hydra of MPICH 5.0 and Intel MPI 2021.18 starts no ranks there.)"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from livecluster import HERE, MEETING, PYTHON, Cluster, assert_met
from mpis import find_mpi

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("ipv6")]  # one worker makes the cluster of this file


@pytest.fixture(scope="module")
def cluster(cluster_on: Callable[[str], Iterator[Cluster]]) -> Iterator[Cluster]:
    yield from cluster_on("v6")


def test_ranks_of_srun_form_a_group(cluster: Cluster, shared: Path) -> None:
    ranks = assert_met(cluster, ["srun", "-N2", "-n2", *MEETING], 2, cwd=shared)
    assert {(rank["address"], rank["gloo"]) for rank in ranks} == {("node1", None)}


# openmpi5 in short: test_channels.py, over IPv4
@pytest.mark.parametrize("name", ["openmpi4", pytest.param("openmpi5", marks=pytest.mark.slow)])
def test_ranks_of_mpirun_form_a_group(cluster: Cluster, shared: Path, name: str) -> None:
    mpi = find_mpi(name)
    mpirun, *options = mpi.over_hosts({"node1": 1, "node2": 1}, 2, shared)
    env = mpi.env | {"HPCDDP_RUN_DIR": str(shared / "run"), "HPCDDP_ATTEMPT": "local-1"}
    forward = ["-x", "HPCDDP_RUN_DIR", "-x", "HPCDDP_ATTEMPT"]
    ranks = assert_met(cluster, [mpirun, *forward, *options, *MEETING], 2, cwd=shared, env=env)
    assert {rank["channel"] for rank in ranks} == {"file"}


def test_exec_exports_an_address_that_every_rank_reaches(cluster: Cluster, shared: Path) -> None:
    meet = ["hpcddp", "exec", "--", PYTHON, f"{HERE}/programs/meet.py"]
    assert cluster.ok(["srun", "-N2", "-n3", *meet], cwd=shared).strip() == "met: 0@node1 1@node1 2@node2"
    env = {"HPCDDP_RUN_DIR": str(shared / "run"), "HPCDDP_INTERFACE": "eth0"}
    show = ["hpcddp", "exec", "--", "sh", "-c", "echo $MASTER_ADDR"]
    assert set(cluster.ok(["srun", "-N2", "-n2", *show], cwd=shared, env=env).split()) == {"fd66::11"}
    assert cluster.ok(["srun", "-N2", "-n2", *meet], cwd=shared, env=env).strip() == "met: 0@node1 1@node2"


@pytest.mark.slow  # test_rendezvous.py: the same over IPv4
def test_a_host_whose_name_is_a_loopback_address_is_reached_by_its_route(cluster: Cluster, shared: Path) -> None:
    (shared / "rank.sh").write_text(f"""
        sed "s/^.* $(hostname)$/127.0.1.1 $(hostname)/" /etc/hosts > {shared}/hosts-$(hostname)
        mount --bind {shared}/hosts-$(hostname) /etc/hosts
        exec {" ".join(MEETING)}
    """)
    ranks = assert_met(cluster, ["srun", "-N2", "-n2", "unshare", "--mount", "sh", f"{shared}/rank.sh"], 2, cwd=shared)
    assert {rank["gloo"] for rank in ranks} == {"eth0"}
