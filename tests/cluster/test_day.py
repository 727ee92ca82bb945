"""A day on a cluster, by hpcddp's verbs alone, on a real Slurm: submitted, watched, stopped, resumed, swept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from livecluster import HERE, PYTHON, Cluster, wait_until

pytestmark = pytest.mark.cluster

STEPS = f"{PYTHON} {HERE.parent}/multirank/programs/steps.py"
ASKED = ["--site", f"{HERE}/site.yaml", "--ranks-per-node", "1", "--cpus-per-rank", "1"]
ENDED = {"finished", "failed", "unfinished", "cancelled"}


def submit(cluster: Cluster, shared: Path, *words: str) -> str:
    return cluster.ok(["env", "--unset=HPCDDP_TEST_MARK", "hpcddp", "submit", *ASKED, *words], cwd=shared).strip()


def status(cluster: Cluster, shared: Path, run: str) -> dict[str, Any]:
    told = json.loads(cluster.ok(["hpcddp", "status", "--json", run], cwd=shared))
    assert told["problems"] == []
    found: dict[str, Any] = told["runs"][0]
    return found


def until(cluster: Cluster, shared: Path, run: str, states: set[str]) -> dict[str, Any]:
    wait_until(lambda: status(cluster, shared, run)["state"] in states, lambda: status(cluster, shared, run))
    return status(cluster, shared, run)


def test_a_day(cluster: Cluster, shared: Path) -> None:
    # submitted: one runs on all nodes, the next one waits behind it
    job = submit(cluster, shared, "--nodes", "2", "--name", "long", "--chain", "3", "--", *STEPS.split(), "100", "0.5")
    wait_until((shared / "here-0").exists, lambda: status(cluster, shared, "long"))
    waits = submit(cluster, shared, "--name", "next", "--after", "afterany:long", "--", *STEPS.split(), "2", "0")
    # watched
    running = status(cluster, shared, "long")
    assert (running["state"], running["job"], running["total_steps"]) == ("running", job, 200)
    assert running["step"] >= 1
    assert running["loss"] > 0
    assert running["ends"] is not None
    assert running["links"] == {"job": 1, "of": 3}
    queued = status(cluster, shared, waits)
    assert (queued["name"], queued["state"], queued["why"]) == ("next", "queued", f"waits for {job}")
    refused = cluster.sh(["hpcddp", "submit", *ASKED, "--name", "long", "--", *STEPS.split(), "100", "0.5"], cwd=shared)
    assert refused.returncode == 2
    assert f"job {job} (running) has runs/long" in refused.stderr
    # stopped: it saves first, and nothing of the chain follows
    said = cluster.sh(["hpcddp", "cancel", "long"], cwd=shared)
    assert said.returncode == 0
    assert f"{job} was asked to save and stop" in said.stderr
    stopped = until(cluster, shared, "long", ENDED)
    assert (stopped["state"], stopped["why"]) == ("unfinished", "SIGTERM")
    assert until(cluster, shared, "next", ENDED)["state"] == "finished"
    log = cluster.ok(["hpcddp", "logs", "long", "-n", "20"], cwd=shared)
    assert f"unfinished (a signal) after step {stopped['step']}" in log
    merged = cluster.ok(["hpcddp", "logs", "long", "--rank", "all"], cwd=shared)
    assert all(line.startswith(("job | ", "node2 rank 1 | ")) for line in merged.splitlines())
    # resumed, in the same run
    (shared / "hurry").touch()
    submit(cluster, shared, "--nodes", "2", "--name", "long", "--", *STEPS.split(), "100", "0.5")
    finished = until(cluster, shared, "long", ENDED)
    assert (finished["state"], finished["step"]) == ("finished", 200)
    attempts = cluster.ok(["hpcddp", "logs", "long", "--attempt", "all"], cwd=shared)
    assert f"resumed from step {stopped['step']}" in attempts
    # swept
    submit(cluster, shared, "--name", "sweep", "--set", "sweep.epochs=1-3", "--", *STEPS.split(), "{epochs}", "0")
    swept = until(cluster, shared, "sweep", ENDED)
    assert swept["why"].startswith("3 finished; best sweep.")
    assert [status(cluster, shared, f"sweep.{i}")["step"] for i in (1, 2, 3)] == [2, 4, 6]
    scaled = submit(cluster, shared, "--name", "scale", "--set", "sweep.nodes=1,2", "--", *STEPS.split(), "1", "0")
    assert len(scaled.splitlines()) == 2
    assert until(cluster, shared, "scale", ENDED)["why"].startswith("2 finished")
    both = [json.loads((shared / f"runs/scale.{i}/plan.json").read_text())["nodes"] for i in (1, 2)]
    assert both == [1, 2]
    weights = {status(cluster, shared, f"scale.{i}")["step"] for i in (1, 2)}
    assert weights == {2}


def test_a_job_that_is_queued_again_is_what_slurm_says_for_every_verb(cluster: Cluster, shared: Path) -> None:
    command = ["--name", "again", "--set", "requeue=true", "--", *STEPS.split(), "5000", "0.1"]
    job = submit(cluster, shared, *command)
    later = ["scontrol", "update", f"jobid={job}", "StartTime=now+1hour"]
    for state in ("running", "queued", "running"):
        if state == "queued":
            (shared / "here-0").unlink()
            cluster.ok(["scontrol", "requeue", job], cwd=shared)
            # else Slurm would start it by itself after two minutes, which a busy machine may take for what follows
            wait_until(lambda: cluster.sh(later, cwd=shared).returncode == 0, lambda: status(cluster, shared, "again"))
        elif not (shared / "here-0").exists() and (shared / "runs/again/holders").exists():
            cluster.ok(["scontrol", "update", f"jobid={job}", "StartTime=now"], cwd=shared)
        assert until(cluster, shared, "again", {state})["job"] == job
        if state == "running":
            wait_until((shared / "here-0").exists, lambda: status(cluster, shared, "again"))
        refused = cluster.sh(["hpcddp", "submit", *ASKED, *command], cwd=shared)
        assert f"job {job} ({state}) has runs/again" in refused.stderr
    assert len(list((shared / "runs/again/holders").glob("0*"))) == 2
    said = cluster.sh(["hpcddp", "cancel", "again"], cwd=shared)
    assert f"{job} was asked to save and stop" in said.stderr
    assert until(cluster, shared, "again", ENDED)["state"] == "unfinished"
