"""Inside jobs: what sbatch, salloc, arrays, requeues and mpirun in a batch script leave around a process."""

from __future__ import annotations

from pathlib import Path

import pytest
from livecluster import PLACE, PYTHON, Cluster, assert_is_label, assert_is_mpi, assert_one_world, by_label, wait_until
from mpis import Mpi

pytestmark = pytest.mark.cluster


def assert_not_launched(places: list[dict], hint: str) -> None:
    assert len(places) == 1
    assert places[0]["status"] == 4, places[0]
    assert "not launched" in places[0]["error"], places[0]["error"]
    assert hint in places[0]["error"].partition("\nhint: ")[2], places[0]["error"]


@pytest.mark.parametrize(
    "request_", [["-N2", "-n4"], ["-N2"], ["-n1"], ["-N1", "-n1", ":", "-N2", "-n4"]], ids=" ".join
)
def test_a_batch_shell_is_not_launched(cluster: Cluster, shared: Path, request_: list[str]) -> None:
    job = cluster.batch(f"{PYTHON} {PLACE} {shared}", *request_, cwd=shared)
    assert job.state in {"COMPLETED"}, job.output
    assert_not_launched(cluster.places(shared), "srun")


def test_the_elements_of_an_array_are_worlds_of_their_own(cluster: Cluster, shared: Path) -> None:
    own_id = "import os; from hpcddp.schedulers.registry import find_current_job as f; print(f(os.environ).id)"
    script = f"""
        mkdir $SLURM_ARRAY_TASK_ID; srun --label {PYTHON} {PLACE} {shared}/$SLURM_ARRAY_TASK_ID
        scontrol --oneliner show job "$({PYTHON} -c '{own_id}')" > $SLURM_ARRAY_TASK_ID.job
    """
    job = cluster.batch(script, "--array=3-4", "-N2", "-n2", cwd=shared)
    assert job.state == "COMPLETED", job.output
    ports = set()
    for element in ("3", "4"):
        places = cluster.places(shared / element)
        assert_one_world(places, "srun", 2)
        ports |= {place["found"]["master_port"] for place in places}
        (shown,) = (shared / f"{element}.job").read_text().splitlines()  # by its own id, no other one's
        assert f" ArrayTaskId={element} " in shown
    assert ports == {None} or len(ports) == 2


def test_a_requeued_job_finds_its_ranks_again(cluster: Cluster, shared: Path) -> None:
    script = f"""
        run=${{SLURM_RESTART_COUNT:-0}}
        mkdir {shared}/$run
        srun --label {PYTHON} {PLACE} {shared}/$run > {shared}/$run.said
        [ $run = 1 ] || {{ scontrol requeue $SLURM_JOB_ID; sleep 600; }}
    """
    job = cluster.submit(f"#!/bin/bash\n{script}", "-N2", "-n3", "--requeue", cwd=shared)
    wait_until(
        lambda: cluster.ok(["squeue", "--noheader", "--format=%r", f"--jobs={job}"], cwd=shared).strip() == "BeginTime",
        lambda: cluster.ok(["scontrol", "show", "job", job], cwd=shared),
    )
    # not after two minutes; the nodes would refuse a job that comes back in the second in which it was cancelled
    cluster.ok(["scontrol", "update", f"jobid={job}", "StartTime=now+2"], cwd=shared)
    assert cluster.wait(job, cwd=shared).state == "COMPLETED"
    for run in ("0", "1"):
        assert_is_label(by_label((shared / f"{run}.said").read_text(), shared / run), 3)


def test_mpirun_in_a_batch_script_makes_mpi_ranks(cluster: Cluster, shared: Path, mpi: Mpi) -> None:
    exports = "\n".join(f"export {name}={value}" for name, value in mpi.env.items())
    forward = "-x LD_LIBRARY_PATH -x MPI4PY_LIBMPI" if mpi.launcher == "openmpi" else ""
    script = f"{exports}\n{mpi.prefix}/bin/mpirun {forward} {PYTHON} {PLACE} {shared} mpi"
    job = cluster.batch(script, "-N2", "--ntasks-per-node=2", cwd=shared)
    assert job.state == "COMPLETED", job.output
    places = cluster.places(shared)
    assert len(places) == 4, job.output
    assert_is_mpi(places, mpi.launcher, 4)
