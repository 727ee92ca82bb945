"""What a rank can see to be wrong with its job although the run may go on, made for real and told."""

from __future__ import annotations

from pathlib import Path

import pytest
from livecluster import HERE, PYTHON, Cluster, wait_until

pytestmark = pytest.mark.cluster

REDUCE = [PYTHON, f"{HERE}/programs/reduce.py"]
QUIET = {"OMP_NUM_THREADS": "1"}


def test_a_master_name_that_no_node_knows_is_refused_at_once(cluster: Cluster, shared: Path) -> None:
    leaked = {"MASTER_ADDR": "node1.wrong", "MASTER_PORT": "23456"}
    for command in (["hpcddp", "exec", "--", "true"], REDUCE):
        done = cluster.sh(["srun", "-N2", "-n2", *command], cwd=shared, env=QUIET | leaked)
        assert done.returncode != 0
        assert "rank 0's host 'node1.wrong' (MASTER_ADDR) does not resolve on node" in done.stderr
        assert "\nhint: give all ranks MASTER_ADDR=" in done.stderr


def test_an_srun_that_does_not_inherit_the_job_s_cpus(cluster: Cluster, shared: Path) -> None:
    one = "taskset --cpu-list $(taskset -cp $$ | sed 's/.*: //; s/[-,].*//')"
    step = f"srun -n2 sh -c 'OMP_NUM_THREADS=1 {one} hpcddp env'".replace("'s/", '"s/').replace("//'", '//"')
    job = cluster.batch(step, "-N1", "-n2", "-c4", cwd=shared)
    assert "the job has 4 CPUs per task (SLURM_CPUS_PER_TASK), but this rank may use 1" in job.output
    job = cluster.batch(f"export SRUN_CPUS_PER_TASK=4\n{step}", "-N1", "-n2", "-c4", cwd=shared)
    assert "CPUs per task" not in job.output


def test_a_signal_to_the_job_s_steps_reaches_the_command(cluster: Cluster, shared: Path) -> None:
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
