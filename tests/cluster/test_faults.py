"""Launches that go wrong in the field, done for real: the fault is named, by every process that can see it."""

from __future__ import annotations

from pathlib import Path

import pytest
from livecluster import PLACE, PYTHON, Cluster, Place, assert_is_label, assert_one_world, by_label
from mpis import find_mpi

pytestmark = pytest.mark.cluster


def assert_refused(places: list[Place], count: int, *words: str) -> None:
    """So many processes were told, in two lines and with exit status 4, what all these words say."""
    assert len(places) == count
    for place in places:
        assert place["status"] == 4, place
        assert "\nhint: " in place["error"]
        for word in words:
            assert word in place["error"], place["error"]


def test_singletons_of_an_mpi_that_srun_does_not_know_are_ranks_all_the_same(cluster: Cluster, shared: Path) -> None:
    srun = ["srun", "--label", "--mpi=none", "-N2", "-n3", PYTHON, PLACE, str(shared), "mpi"]
    places = by_label(cluster.ok(srun, cwd=shared, env=find_mpi("mpich").env), shared)
    assert {place["mpi"]["world_size"] for place in places.values()} == {1}
    assert_is_label(places, 3)


def test_an_mpirun_of_one_in_every_task_is_refused(cluster: Cluster, shared: Path) -> None:
    mpi = find_mpi("mpich")
    mpirun = f"{mpi.prefix}/bin/mpirun -launcher fork -hosts localhost -np 1 {PYTHON} {PLACE} {shared}"
    cluster.sh(["srun", "-N2", "-n3", "sh", "-c", mpirun], cwd=shared, env=mpi.env)
    assert_refused(cluster.places(shared), 3, "3 processes were started", "each is alone")


def test_a_world_of_one_in_an_allocation_for_more_is_refused(cluster: Cluster, shared: Path) -> None:
    job = cluster.batch(f"RANK=0 WORLD_SIZE=1 {PYTHON} {PLACE} {shared}", "-N2", "-n4", cwd=shared)
    assert job.state == "COMPLETED", job.output
    assert_refused(cluster.places(shared), 1, "WORLD_SIZE=1", "4 slots", "srun")


@pytest.mark.parametrize("pmi", ["none", "pmi2", "pmix"])
def test_a_job_submitted_from_inside_a_job_does_not_inherit_its_ranks(cluster: Cluster, shared: Path, pmi: str) -> None:
    (shared / "batch").mkdir()
    (shared / "step").mkdir()
    inner = f"#!/bin/bash\n{PYTHON} {PLACE} {shared}/batch\nsrun --mpi={pmi} -n2 {PYTHON} {PLACE} {shared}/step\n"
    (shared / "inner.sh").write_text(inner)
    submit = f"[ $SLURM_PROCID = 1 ] || exec sbatch -o {shared}/inner.out -N2 -n2 {shared}/inner.sh"
    job = cluster.batch(f"srun --mpi={pmi} -N1 -n2 sh -c '{submit}'", "-N1", "-n4", cwd=shared)
    assert job.state == "COMPLETED", job.output
    cluster.wait(job.output.split()[-1], cwd=shared)
    assert_refused(cluster.places(shared / "batch"), 1, "not launched")
    assert_one_world(cluster.places(shared / "step"), "srun", 2)


def test_the_shared_store_of_an_outer_torchrun_is_refused(cluster: Cluster, shared: Path) -> None:
    leaked = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    done = cluster.sh(["srun", "-N2", "-n2", "hpcddp", "exec", "--", "true"], cwd=shared, env=leaked)
    assert done.returncode == 4
    assert "TORCHELASTIC_USE_AGENT_STORE=True, but no torchrun started this process" in done.stderr
    assert "hint: unset TORCHELASTIC_USE_AGENT_STORE" in done.stderr


@pytest.mark.parametrize("wrong", ["login", "localhost", "node9", "node2"])
def test_a_master_address_that_is_not_rank_0s_is_not_used(cluster: Cluster, shared: Path, wrong: str) -> None:
    cluster.ok(["srun", "-N2", "-n2", PYTHON, PLACE, str(shared)], cwd=shared, env={"MASTER_ADDR": wrong})
    places = cluster.places(shared)
    assert_one_world(places, "srun", 2)
    assert {place["found"]["master_addr"] for place in places} == {"node1"}


def test_fully_qualified_host_names_are_the_same_hosts(cluster: Cluster, shared: Path) -> None:
    renamed = f"hostname $(hostname).cluster; exec {PYTHON} {PLACE} {shared}"
    cluster.ok(["srun", "-N2", "-n3", "unshare", "--uts", "sh", "-c", renamed], cwd=shared)
    places = cluster.places(shared)
    for place in places:
        assert place["status"] == 0, place["error"]
        assert place["host"].endswith(".cluster")
    assert sorted(place["found"]["rank"] for place in places) == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "devices"),
    [
        ("--gpus-per-task=1", [0, 0, 0, 0]),
        ("--gpus-per-node=2", [0, 1, 0, 1]),
        ("--gpus-per-node=8", [0, 1, 0, 1]),
        ("--gpus-per-node=1", [0, 0, 0, 0]),
    ],
)
def test_the_device_is_an_index_among_those_that_slurm_shows(
    cluster: Cluster, shared: Path, options: str, devices: list[int]
) -> None:
    srun = ["srun", "--label", "-N2", "--ntasks-per-node=2", options, PYTHON, PLACE, str(shared)]
    places = by_label(cluster.ok(srun, cwd=shared), shared)
    assert [places[rank]["device"] for rank in range(4)] == devices


@pytest.mark.parametrize(
    ("options", "devices"),
    [
        ("--gpus-per-task=2", [[0, 1], [0, 1], [0, 1], [0, 1]]),
        ("--gpus-per-node=8", [[0, 1], [2, 3], [0, 1], [2, 3]]),
    ],
)
def test_ranks_with_two_devices_each_take_their_own_of_those_that_slurm_shows(
    cluster: Cluster, shared: Path, options: str, devices: list[list[int]]
) -> None:
    srun = ["srun", "--label", "-N2", "--ntasks-per-node=2", options, PYTHON, PLACE, str(shared)]
    places = by_label(cluster.ok(srun, cwd=shared, env={"HPCDDP_GPUS_PER_RANK": "2"}), shared)
    assert [places[rank]["device"] for rank in range(4)] == devices


def test_a_rank_that_never_comes_is_named(cluster: Cluster, shared: Path) -> None:
    rank = f"[ $SLURM_PROCID = 1 ] || exec {PYTHON} {Path(PLACE).parent}/reduce.py 2"
    done = cluster.sh(["srun", "-N2", "-n3", "sh", "-c", rank], cwd=shared, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode != 0
    assert "1 of 3 ranks did not arrive in 1 s: rank 1\nhint: " in done.stderr
    assert "sum:" not in done.stdout


def test_a_second_rank_0_on_another_host_is_named(cluster: Cluster, shared: Path) -> None:
    leaked = {"HPCDDP_LAUNCHER": "env", "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "23456"}
    command = ["srun", "-N2", "-n2", PYTHON, f"{Path(PLACE).parent}/reduce.py", "nobody"]
    done = cluster.sh(command, cwd=shared, env=leaked | {"OMP_NUM_THREADS": "1"})
    assert done.returncode != 0
    assert "rank 0 is on node2, but the other ranks will look for it on node1" in done.stderr
    assert "sum:" not in done.stdout
