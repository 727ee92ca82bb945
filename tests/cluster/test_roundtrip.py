"""Planned once, found again: what `layout` predicts for each rank is what the launcher sets in the rendered job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from livecluster import HERE, PLACE, PYTHON, Cluster, assert_is_label, assert_one_world
from mpis import find_mpi

pytestmark = pytest.mark.cluster

OPTIONS = f"--site {HERE}/site.yaml --cpus-per-rank 1"
# Which MPI is on PATH. Of Open MPI, 4 sets all that is predicted; 5 leaves out the number of nodes.
LAUNCHERS = {"srun": "mpich", "openmpi": "openmpi4", "mpich": "mpich", "intelmpi": "impi", "torchrun": "mpich"}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_are_what_layout_predicts(cluster: Cluster, shared: Path, launcher: str) -> None:
    environment = find_mpi(LAUNCHERS[launcher]).env
    options = f"{OPTIONS} --launcher {launcher} --nodes 2 --ranks-per-node 2 --name planned -- true"
    layout = json.loads(cluster.ok(["sh", "-c", f"hpcddp layout --json {options}"], cwd=shared))
    pipe = f"hpcddp render {options} | env --unset=HPCDDP_TEST_MARK sbatch --parsable --output=job-%A.out"
    job = cluster.wait(cluster.ok(["sh", "-c", pipe], cwd=shared, env=environment).strip(), cwd=shared)
    assert job.state == "COMPLETED", job.output

    assert [rank["rank"] for rank in layout["ranks"]] == [0, 1, 2, 3]
    for rank in layout["ranks"]:
        file = shared / "runs/planned/attempts" / f"{job.id}.1" / "env" / f"rank-{rank['rank']:04d}.env"
        found = dict(line.split("=", 1) for line in file.read_text().split("\0") if line)
        assert rank["environment"]
        assert {name: found.get(name) for name in rank["environment"]} == rank["environment"]
        assert (found["RANK"], found["WORLD_SIZE"]) == (str(rank["rank"]), "4")
        assert (found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == (str(rank["local_rank"]), "2")
        assert found["SLURMD_NODENAME"] in {f"node{rank['node_rank'] + 1}", "node1"}  # mpirun may carry node1's on


# What TACC's script does, as far as its manual says it: a stand-in.
IBRUN = """#!/bin/bash
[ "$1 $3 $4" = "-n -o 0" ] || exit 2 # the two go together
ranks=$2
shift 4
exec mpiexec.hydra -n "$ranks" -ppn "$TACC_TASKS_PER_NODE" "$@"
"""


def test_ibrun_starts_the_ranks_of_the_mpi_that_it_calls(cluster: Cluster, shared: Path) -> None:
    (shared / "bin").mkdir()
    (shared / "bin/ibrun").write_text(IBRUN)
    (shared / "bin/ibrun").chmod(0o755)
    environment = dict(find_mpi("impi").env)
    path = f"{shared}/bin:{environment.pop('PATH', '/usr/bin:/bin')}"
    more = "I_MPI_JOB_RESPECT_PROCESS_PLACEMENT=off"
    options = f"{OPTIONS} --launcher ibrun --nodes 2 --ranks-per-node 2 --name called -- {PYTHON} {PLACE} {shared}"
    pipe = f"hpcddp render {options} | PATH={path} {more} env --unset=HPCDDP_TEST_MARK sbatch --parsable"
    job = cluster.wait(cluster.ok(["sh", "-c", pipe], cwd=shared, env=environment).strip(), cwd=shared)
    assert job.state == "COMPLETED", job.output
    places = cluster.places(shared)
    assert_one_world(places, "intelmpi", 4)
    assert sorted(place["host"] for place in places) == ["node1", "node1", "node2", "node2"]


def test_launch_in_a_salloc_shell_starts_the_ranks_of_the_allocation(cluster: Cluster, shared: Path) -> None:
    launch = ["hpcddp", "launch", "--name", "here", "--", PYTHON, PLACE, str(shared)]
    cluster.ok(["salloc", "--quiet", "-N2", "--ntasks-per-node=2", *launch], cwd=shared)
    places = cluster.places(shared)
    assert_is_label({place["found"]["rank"]: place for place in places}, 4)
    assert sorted(place["host"] for place in places) == ["node1", "node1", "node2", "node2"]
