"""Hosts whose names belong to a network on which they cannot reach each other, and a site's recipe for the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from livecluster import HERE, MEETING, PYTHON, Cluster, assert_met
from mpis import find_mpi

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("two_networks")]  # one worker makes the cluster of this file

MEET = ["hpcddp", "exec", "--", PYTHON, f"{HERE}/programs/meet.py"]
SUFFIX = {"HPCDDP_HOST_SUFFIX": "i"}
ON_NODE1 = "10.67.0.11"


@pytest.fixture(scope="module")
def cluster(cluster_on: Callable[[str], Iterator[Cluster]]) -> Iterator[Cluster]:
    yield from cluster_on("two")


def test_without_a_recipe_rank_0_is_not_found(cluster: Cluster, shared: Path) -> None:
    srun = ["srun", "-N2", "-n2", PYTHON, f"{HERE}/programs/reduce.py", "nobody"]
    done = cluster.sh(srun, cwd=shared, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode != 0
    assert "rank 0 was not found at node1" in done.stderr
    assert "the nodes reach each other under this address" in done.stderr


def test_a_suffix_leads_to_the_other_network(cluster: Cluster, shared: Path) -> None:
    assert cluster.ok(["srun", "-N2", "-n3", *MEET], cwd=shared, env=SUFFIX).strip() == "met: 0@node1 1@node1 2@node2"
    ranks = assert_met(cluster, ["srun", "-N2", "-n2", *MEETING], 2, cwd=shared, env=SUFFIX)
    assert {(rank["address"], rank["gloo"]) for rank in ranks} == {(f"{ranks[0]['host']}i", "eth1")}


def test_a_domain_leads_to_the_other_network(cluster: Cluster, shared: Path) -> None:
    hosts = "".join(f"10.67.0.{10 + n} node{n}.hsn.test\n" for n in (1, 2))
    (shared / "rank.sh").write_text(f"""
        {{ cat /etc/hosts; printf '{hosts}'; }} > {shared}/hosts-$(hostname)
        mount --bind {shared}/hosts-$(hostname) /etc/hosts
        exec {" ".join(MEETING)}
    """)
    srun = ["srun", "-N2", "-n2", "unshare", "--mount", "sh", f"{shared}/rank.sh"]
    ranks = assert_met(cluster, srun, 2, cwd=shared, env={"HPCDDP_HOST_SUFFIX": ".hsn.test"})
    assert {(rank["address"], rank["gloo"]) for rank in ranks} == {("node1.hsn.test", "eth1")}


def test_an_interface_leads_to_the_other_network(cluster: Cluster, shared: Path) -> None:
    env = {"HPCDDP_INTERFACE": "eth1", "HPCDDP_RUN_DIR": str(shared / "run"), "MASTER_ADDR": "node1"}
    assert cluster.ok(["srun", "-N2", "-n2", *MEET], cwd=shared, env=env).strip() == "met: 0@node1 1@node2"
    ranks = assert_met(cluster, ["srun", "-N2", "-n2", *MEETING], 2, cwd=shared, env=env)
    assert {(rank["channel"], rank["address"], rank["gloo"]) for rank in ranks} == {("file", ON_NODE1, "eth1")}


INTERFACE = {"HPCDDP_INTERFACE": "eth1"}
SLOW = pytest.mark.slow  # srun's ranks have both recipes above; in short, the others have one


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        pytest.param("impi", INTERFACE, id="impi-interface"),
        pytest.param("mpich", SUFFIX, id="mpich-suffix", marks=SLOW),
        pytest.param("mpich", INTERFACE, id="mpich-interface", marks=SLOW),
        pytest.param("impi", SUFFIX, id="impi-suffix", marks=SLOW),
    ],
)
def test_the_run_folder_tells_ranks_of_hydra_the_address_on_the_other_network(
    cluster: Cluster, shared: Path, name: str, recipe: dict[str, str]
) -> None:
    mpi = find_mpi(name)
    env = recipe | {"HPCDDP_RUN_DIR": f"{shared}/run", "HPCDDP_ATTEMPT": "local-1"}
    mpirun = [*mpi.over_hosts({"node1": 1, "node2": 1}, 2, shared), "env", *(f"{k}={v}" for k, v in env.items())]
    ranks = assert_met(cluster, [*mpirun, *MEETING], 2, cwd=shared, env=mpi.env)
    address = ON_NODE1 if recipe == INTERFACE else "node1i"
    assert {(rank["channel"], rank["address"], rank["gloo"]) for rank in ranks} == {("file", address, "eth1")}
