"""Runs of jobs on a real Slurm: one job at a time, a killed one keeps nobody out, and why one has failed."""

from __future__ import annotations

from pathlib import Path

import pytest
from livecluster import HERE, PYTHON, Cluster, wait_until

pytestmark = pytest.mark.cluster

STEPS = f"{PYTHON} {HERE.parent}/multirank/programs/steps.py 10000 0.02"


def submit(cluster: Cluster, shared: Path, node: str, *asked: str) -> str:
    request = ["--site", f"{HERE}/site.yaml", "--ranks-per-node", "1", "--cpus-per-rank", "1", "--name", "long", *asked]
    where = ["--set", f"directives=--nodelist={node}"]
    text = cluster.ok(["hpcddp", "render", *request, *where, "--", *STEPS.split()], cwd=shared)
    return cluster.submit(text, cwd=shared)


def test_another_node_asks_slurm_whether_the_job_that_holds_the_run_has_ended(cluster: Cluster, shared: Path) -> None:
    first = submit(cluster, shared, "node1")
    wait_until((shared / "here-0").exists, lambda: "the first job has not begun")
    second = cluster.wait(submit(cluster, shared, "node2"), cwd=shared)
    assert second.state == "FAILED"
    assert f"run runs/long is in use by job {first} on node1" in second.output
    assert "hint: wait for its end; or a run of its own: --name X" in second.output
    cluster.ok(["scancel", "--full", "--signal=KILL", first], cwd=shared)
    cluster.wait(first, cwd=shared)
    # Slurm kills the ranks before the shell, which may have come to its end: as if all had been killed at once
    (shared / "runs/long/holders/000001/ended").unlink(missing_ok=True)
    (shared / "here-0").unlink()
    third = submit(cluster, shared, "node2")
    wait_until((shared / "here-0").exists, lambda: "the third job has not begun")
    cluster.ok(["scancel", "--batch", "--signal=TERM", third], cwd=shared)
    assert "hpcddp: run runs/long: " in cluster.wait(third, cwd=shared).output


def test_a_refusal_on_one_node_is_why_the_job_failed_though_srun_then_ends_the_others(
    cluster: Cluster, shared: Path
) -> None:
    shape = ["--site", f"{HERE}/site.yaml", "--nodes", "2", "--ranks-per-node", "1", "--cpus-per-rank", "1"]
    text = cluster.ok(["hpcddp", "render", *shape, "--name", "refused", "--", "sleep", "600"], cwd=shared)
    job = cluster.wait(cluster.submit(text, "--export=ALL,NODE_RANK=0", cwd=shared), cwd=shared)
    assert job.state == "FAILED"
    status = " ".join(cluster.ok(["hpcddp", "status", "runs/refused"], cwd=shared).split())
    assert "refused: failed" in status
    assert "SLURM_NODEID says node_rank 1, but NODE_RANK=0 is exported too" in status
