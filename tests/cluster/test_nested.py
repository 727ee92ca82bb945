"""A launcher inside a launcher: the innermost counts, whatever the outer one has left in the environment."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from livecluster import PLACE, PYTHON, Cluster, Place, assert_is_label, assert_is_mpi, assert_one_world, by_label
from mpis import Mpi, find_mpi

pytestmark = pytest.mark.cluster

TWO_HOSTS = {"node1": 1, "node2": 1}


def assert_one_torchrun(places: list[Place]) -> None:
    """2 hosts with 2 workers each."""
    for place in places:
        assert place["status"] == 0, place["error"]
    assert_one_world(places, "torchrun", 4)
    assert {place["found"]["node_rank"] for place in places} == {0, 1}


def test_torchrun_in_srun(cluster: Cluster, shared: Path) -> None:
    torchrun = (
        "torchrun --nnodes=2 --nproc-per-node=2 --node-rank=$SLURM_NODEID --master-addr=node1 --master-port=29400"
    )
    srun = ["srun", "-N2", "--ntasks-per-node=1", "sh", "-c", f"exec {torchrun} {PLACE} {shared}"]
    cluster.ok(srun, cwd=shared)
    assert_one_torchrun(cluster.places(shared))


@pytest.mark.slow  # in short: in srun
def test_torchrun_in_mpirun(cluster: Cluster, shared: Path) -> None:
    mpi = find_mpi("openmpi4")
    torchrun = [str(Path(PYTHON).parent / "torchrun"), "--nnodes=2", "--nproc-per-node=2"]
    torchrun += ["--rdzv-backend=c10d", "--rdzv-endpoint=node1:29400", "--rdzv-id=nested"]
    mpirun = mpi.over_hosts(TWO_HOSTS, 2, shared)
    cluster.ok([*mpirun, *torchrun, PLACE, str(shared)], cwd=shared, env=mpi.env)
    assert_one_torchrun(cluster.places(shared))


def inner_launch(outer: Mpi, inner: Mpi, folder: Path, *, ask_mpi: bool) -> list[str]:
    """On each of two hosts, one rank of `outer` starts a world of two ranks of `inner`, which write to OUT/HOST."""
    exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in inner.env.items())
    mpirun = shlex.join([*inner.mpirun(2), PYTHON, PLACE])
    script = f"mkdir -p {folder}/$(hostname); {exports} {mpirun} {folder}/$(hostname) {'mpi' if ask_mpi else ''}"
    return [*outer.over_hosts(TWO_HOSTS, 2, folder), "bash", "-c", script]


@pytest.mark.parametrize("name", ["openmpi4", "openmpi5"])
@pytest.mark.parametrize("hydra", ["mpich", "impi"])
def test_open_mpi_in_hydra(cluster: Cluster, shared: Path, hydra: str, name: str) -> None:
    outer, inner = find_mpi(hydra), find_mpi(name)
    cluster.ok(inner_launch(outer, inner, shared, ask_mpi=True), cwd=shared, env=outer.env)
    for host in TWO_HOSTS:
        assert_is_mpi(cluster.places(shared / host), "openmpi", 2)


@pytest.mark.parametrize("name", ["openmpi4", "openmpi5", "mpich"])
def test_srun_in_mpirun_in_a_job(cluster: Cluster, shared: Path, name: str) -> None:
    mpi = find_mpi(name)
    exports = "\n".join(f"export {name}={value}" for name, value in mpi.env.items())
    srun = f"srun --overlap --label --mpi=none -N2 -n2 {PYTHON} {PLACE} {shared}"
    job = cluster.batch(f"{exports}\n{mpi.prefix}/bin/mpirun -np 1 {srun}", "-N2", "-n4", cwd=shared)
    assert_is_label(by_label(job.output, shared), 2)
