"""What a rank can see to be wrong with its job although the run may go on, made for real and told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from livecluster import HERE, PYTHON, Cluster, wait_until
from mpis import find_mpi

pytestmark = pytest.mark.cluster

ENV = ["hpcddp", "env"]
REDUCE = [PYTHON, f"{HERE}/programs/reduce.py"]
QUIET = {"OMP_NUM_THREADS": "1"}


def warned(cluster: Cluster, line: list[str], shared: Path, **env: str) -> str:
    done = cluster.sh(line, cwd=shared, env=QUIET | env)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_a_sound_step_is_told_nothing(cluster: Cluster, shared: Path) -> None:
    assert "warning" not in warned(cluster, ["srun", "-N2", "-n2", *ENV], shared)


def test_a_torchrun_in_every_task_of_a_node(cluster: Cluster, shared: Path) -> None:
    torchrun = ["torchrun", "--standalone", "--nproc-per-node=2", "--no-python", *ENV]
    said = warned(cluster, ["srun", "-N1", "-n2", *torchrun], shared)
    assert "srun started torchrun 2 times on a node (SLURM_STEP_TASKS_PER_NODE=2), each with 2 ranks" in said
    assert "warning" not in warned(cluster, ["srun", "-N1", "-n1", *torchrun], shared)


def test_a_master_name_that_no_node_knows_is_refused_at_once(cluster: Cluster, shared: Path) -> None:
    leaked = {"MASTER_ADDR": "node1.wrong", "MASTER_PORT": "23456"}
    for command in (["hpcddp", "exec", "--", "true"], REDUCE):
        done = cluster.sh(["srun", "-N2", "-n2", *command], cwd=shared, env=QUIET | leaked)
        assert done.returncode != 0
        assert "rank 0's host 'node1.wrong' (MASTER_ADDR) does not resolve on node" in done.stderr
        assert "\nhint: give all ranks MASTER_ADDR=" in done.stderr


def test_an_nccl_interface_that_the_node_does_not_have(cluster: Cluster, shared: Path) -> None:
    said = warned(cluster, ["srun", "-N2", "-n2", *REDUCE], shared, NCCL_SOCKET_IFNAME="hsn")
    assert said.count("NCCL_SOCKET_IFNAME=hsn leaves no interface of this host, which has lo, eth0") == 1
    assert "warning" not in warned(cluster, ["srun", "-N2", "-n2", *ENV], shared)


def test_a_gpu_for_each_task_alone(cluster: Cluster, shared: Path) -> None:
    srun = ["srun", "-N1", "-n2", "--gpus-per-task=1", *ENV]
    assert "--gpus-per-task shows this rank 1 of 2 GPUs" in warned(cluster, srun, shared)


def test_more_threads_than_the_node_has_cpus(cluster: Cluster, shared: Path) -> None:
    many = str(os.cpu_count() or 1)
    said = warned(cluster, ["srun", "-N1", "-n2", *ENV], shared, OMP_NUM_THREADS=many)
    assert f"OMP_NUM_THREADS={many} times 2 ranks on this node is more than its {many} CPUs" in said


def test_an_srun_that_does_not_inherit_the_job_s_cpus(cluster: Cluster, shared: Path) -> None:
    """Since 22.05. Nothing binds CPUs here, so the rank binds itself to the one that srun would give it."""
    one = "taskset --cpu-list $(taskset -cp $$ | sed 's/.*: //; s/[-,].*//')"
    step = f"srun -n2 sh -c 'OMP_NUM_THREADS=1 {one} hpcddp env'".replace("'s/", '"s/').replace("//'", '//"')
    job = cluster.batch(step, "-N1", "-n2", "-c4", cwd=shared)
    assert "the job has 4 CPUs per task (SLURM_CPUS_PER_TASK), but this rank may use 1" in job.output
    job = cluster.batch(f"export SRUN_CPUS_PER_TASK=4\n{step}", "-N1", "-n2", "-c4", cwd=shared)
    assert "CPUs per task" not in job.output


def test_little_memory_to_lock_beside_infiniband(cluster: Cluster, shared: Path) -> None:
    devices = "mount -t tmpfs class /sys/class; mkdir -p /sys/class/infiniband/mlx5_0"
    line = ["srun", "-N1", "-n2", "unshare", "--mount", "bash", "-c", f"{devices}; ulimit -l 64; exec hpcddp env"]
    assert "this host has InfiniBand, and processes may lock 64 KiB of memory only" in warned(cluster, line, shared)


def test_a_signal_to_the_job_s_steps_reaches_the_command(cluster: Cluster, shared: Path) -> None:
    """Neither the script's shell nor hpcddp exec keeps it: Slurm signals the steps, and exec becomes the command."""
    (shared / "rank.py").write_text("""
import os, signal
rank = os.environ["RANK"]
def end(number, frame):
    open(f"signal-{rank}", "w").write(str(number))
    raise SystemExit
signal.signal(signal.SIGUSR2, end)
open(f"here-{rank}", "w").close()
signal.alarm(600)
signal.pause()
""")
    render = f"hpcddp render --site {HERE}/site.yaml --cpus-per-rank 1 --nodes 2 --ranks-per-node 1 --walltime 0:05:00"
    pipe = f"{render} -- python rank.py | env -u HPCDDP_TEST_MARK sbatch --parsable"
    job = cluster.ok(["bash", "-c", pipe], cwd=shared).strip()
    wait_until(lambda: len(list(shared.glob("here-*"))) == 2)
    cluster.ok(["scancel", "--signal=USR2", job], cwd=shared)
    cluster.wait(job, cwd=shared)
    assert sorted(path.name for path in shared.glob("signal-*")) == ["signal-0", "signal-1"]


@pytest.mark.parametrize(("asked", "name"), [("mpich", "impi"), ("mpich", "openmpi4"), ("openmpi", "mpich")])
def test_launch_does_not_give_one_mpi_the_options_of_another(
    cluster: Cluster, shared: Path, asked: str, name: str
) -> None:
    mpi = find_mpi(name)
    launch = f"hpcddp launch --launcher {asked} --dry-run -- true"
    nodes = {"PBS_NODEFILE": str(shared / "nodes"), "PBS_JOBID": "7.server", "PBS_ENVIRONMENT": "PBS_INTERACTIVE"}
    (shared / "nodes").write_text("node1\nnode2\n")
    line = ["bash", "-c", f"PATH={mpi.prefix}/bin:$PATH; {launch}"]
    done = cluster.sh(line, cwd=shared, env=nodes)
    assert done.returncode == 4
    assert f"the script's line is for {asked}, but {mpi.prefix}/bin/mpi" in done.stderr
    assert f"hint: --launcher {mpi.launcher}" in done.stderr
