"""The whole way: a request becomes a script, sbatch takes it, and ranks on several hosts train together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from livecluster import HERE, Cluster

pytestmark = pytest.mark.cluster

RENDER = f"hpcddp render --site {HERE}/site.yaml --cpus-per-rank 1 --walltime 0:10:00"
TRAIN = "python -m hpcddp train --epochs 1"


def submit(cluster: Cluster, shared: Path, render: str) -> str:
    """`render | sbatch`, as a person types it on the login node; the job's id."""
    pipe = f"set -o pipefail; {render} | env --unset=HPCDDP_TEST_MARK sbatch --parsable --output=job-%A.out"
    return cluster.ok(["bash", "-c", pipe], cwd=shared).strip()


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.first
@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(3, 1), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_a_rendered_job_trains_over_nodes(cluster: Cluster, shared: Path, nodes: int, ranks_per_node: int) -> None:
    size = f"--nodes {nodes} --ranks-per-node {ranks_per_node}"
    job_id = submit(cluster, shared, f"{RENDER} {size} --name trained --global-batch 64 -- {TRAIN} --limit-steps 4")
    job = cluster.wait(job_id, cwd=shared)
    assert "hpcddp: unfinished: step 4" in job.output
    assert "ExitCode=85:0" in cluster.ok(["scontrol", "show", "job", job_id], cwd=shared)

    run = shared / "runs" / "trained"
    attempt = run / "attempts" / f"{job_id}.1"
    plan = json.loads((run / "plan.json").read_text())
    assert (plan["nodes"], plan["world_size"]) == (nodes, nodes * ranks_per_node)
    assert json.loads((run / "state.json").read_text())["step"] == 4
    hosts = ", ".join(f"node{i + 1}" for i in range(nodes))
    assert f"{plan['world_size']} ranks on {nodes} nodes ({hosts})" in job.output
    logs = {f"rank-{rank:04d}.node{rank // ranks_per_node + 1}.log" for rank in range(1, plan["world_size"])}
    assert {path.name for path in attempt.glob("logs/rank-*")} == logs
    environments = [(attempt / "env" / f"rank-{rank:04d}.env").read_text() for rank in range(plan["world_size"])]
    for rank, environment in enumerate(environments):
        found = dict(line.split("=", 1) for line in environment.split("\0") if line)
        assert (found["RANK"], found["SLURM_PROCID"], found["MASTER_ADDR"]) == (str(rank), str(rank), "node1")
        assert int(found["HPCDDP_DEADLINE"]) > 1_600_000_000
    assert (attempt / "script.sh").read_text().startswith("#!/bin/bash\n#SBATCH ")
    losses = [line["loss"] for line in lines_of(attempt / "metrics.jsonl") if "loss" in line]
    assert losses


@pytest.mark.slow  # test_chain.py: a chain's second attempt does
def test_the_second_attempt_goes_on_where_the_first_stopped(cluster: Cluster, shared: Path) -> None:
    render = f"{RENDER} --nodes 2 --ranks-per-node 1 --name twice --global-batch 64 -- {TRAIN}"
    for steps in (3, 5):
        job = cluster.wait(submit(cluster, shared, f"{render} --limit-steps 3"), cwd=shared)
        assert "hpcddp: unfinished" in job.output
        assert json.loads((shared / "runs/twice/state.json").read_text())["step"] >= steps


def test_ranks_under_mpirun_get_the_job_s_environment_on_every_node(cluster: Cluster, shared: Path) -> None:
    show = "sh -c 'echo rank $RANK of $WORLD_SIZE on $(hostname): $COLOUR $HPCDDP_ATTEMPT > seen-$RANK'"
    render = f"{RENDER} --launcher openmpi --nodes 2 --ranks-per-node 1 --name env --set env.COLOUR=blue"
    root = "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
    job_id = submit(cluster, shared, f"{root}; {render} -- {show}")
    job = cluster.wait(job_id, cwd=shared)
    assert job.state == "COMPLETED", job.output
    seen = [(shared / f"seen-{rank}").read_text().strip() for rank in (0, 1)]
    assert seen == [f"rank {rank} of 2 on node{rank + 1}: blue {job_id}.1" for rank in (0, 1)]


@pytest.mark.parametrize("launcher", ["srun", "openmpi"])
def test_the_network_that_a_site_names_reaches_every_rank(cluster: Cluster, shared: Path, launcher: str) -> None:
    (shared / "own.yaml").write_text((HERE / "site.yaml").read_text() + "rendezvous: {suffix: i}\n")
    show = "sh -c 'echo $MASTER_ADDR $HPCDDP_HOST_SUFFIX > seen-$RANK'"
    ask = f"hpcddp render --site {shared}/own.yaml --cpus-per-rank 1 --nodes 2 --ranks-per-node 1 --launcher {launcher}"
    root = "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
    job = cluster.wait(submit(cluster, shared, f"{root}; {ask} -- {show}"), cwd=shared)
    assert job.state == "COMPLETED", job.output
    assert [(shared / f"seen-{rank}").read_text().strip() for rank in (0, 1)] == ["node1i i", "node1i i"]
