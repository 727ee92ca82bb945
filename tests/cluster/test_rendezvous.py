"""`hpcddp exec` gives all ranks one address and port, and it is rank 0's."""

from __future__ import annotations

from pathlib import Path

import pytest
from livecluster import HERE, PYTHON, Cluster
from mpis import Mpi, find_mpi

pytestmark = pytest.mark.cluster

MEET = ["hpcddp", "exec", "--", PYTHON, str(HERE / "programs" / "meet.py")]

STEPS = {
    "block": (["-N2", "-n3"], "met: 0@node1 1@node1 2@node2"),
    "one-node": (["-N1", "-n2"], "met: 0@node1 1@node1"),
    "relative": (["-N2", "-n2", "--relative=1"], "met: 0@node2 1@node3"),
    "plane": (["-N2", "-n4", "--distribution=plane=1"], "met: 0@node1 1@node2 2@node1 3@node2"),
}


@pytest.mark.parametrize("step", STEPS)
def test_ranks_of_srun_meet(cluster: Cluster, shared: Path, step: str) -> None:
    options, met = STEPS[step]
    assert cluster.ok(["salloc", "--quiet", "-N3", "-n12", "srun", *options, *MEET], cwd=shared).strip() == met


def test_ranks_of_mpirun_in_a_job_meet(cluster: Cluster, shared: Path, mpi: Mpi) -> None:
    exports = "\n".join(f"export {name}={value}" for name, value in mpi.env.items())
    forward = "-x LD_LIBRARY_PATH -x PATH" if mpi.launcher == "openmpi" else ""
    job = cluster.batch(f"{exports}\n{mpi.prefix}/bin/mpirun {forward} {' '.join(MEET)}", "-N2", "-n2", cwd=shared)
    assert job.output.strip() == "met: 0@node1 1@node2"
    assert job.state == "COMPLETED"


TWO_HOSTS = {"node1": 1, "node2": 1}


def over_two_hosts(cluster: Cluster, shared: Path, **master: str) -> tuple[int, str]:
    """mpirun without a scheduler, its ranks told so much of MASTER_ADDR and MASTER_PORT; its status and output."""
    mpi = find_mpi("openmpi5")
    forward = [word for name in ("PATH", *master) for word in ("-x", name)]
    mpirun, *options = mpi.over_hosts(TWO_HOSTS, 2, shared)
    done = cluster.sh([mpirun, *forward, *options, *MEET], cwd=shared, env=mpi.env | master)
    return done.returncode, done.stdout + done.stderr


def test_ranks_of_mpirun_meet_where_they_are_told(cluster: Cluster, shared: Path) -> None:
    status, said = over_two_hosts(cluster, shared, MASTER_ADDR="node1", MASTER_PORT="23456")
    assert status == 0
    assert "met: 0@node1 1@node2" in said.splitlines()  # mpirun may have a remark of its own


def test_ranks_whose_host_name_is_a_loopback_address_reach_each_other(cluster: Cluster, shared: Path) -> None:
    (shared / "rank.sh").write_text(f"""
        sed "s/^.* $(hostname)$/127.0.1.1 $(hostname)/" /etc/hosts > {shared}/hosts-$(hostname)
        mount --bind {shared}/hosts-$(hostname) /etc/hosts
        [ "$(getent hosts $(hostname))" = "127.0.1.1       $(hostname)" ] || exit 9
        exec {PYTHON} {HERE}/programs/reduce.py
    """)
    srun = ["srun", "-N2", "-n2", "unshare", "--mount", "sh", str(shared / "rank.sh")]
    said = cluster.ok(srun, cwd=shared, env={"OMP_NUM_THREADS": "1"})
    assert "sum: 3.0" in said
