"""A job on a real Slurm loses ranks and hosts, for real; it goes on with the others, and ends with the weights of an
undisturbed run, bit for bit. The same under each mpirun: test_survival_mpirun.py.

Each test has a cluster of its own: it breaks hosts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from livecluster import HERE, Cluster, wait_until
from struck_job import (
    ASKED,
    AT,
    FAULTS,
    STEPS,
    STRUCK,
    TWO,
    Outcome,
    assert_nothing_is_left,
    remove_memory_group,
)

pytestmark = [pytest.mark.cluster, pytest.mark.first]

FAULTS_HERE = FAULTS | {
    # mpirun's starter starts new ones there, Slurm's needs its daemon
    "all processes of a host are killed": ("host", 2, "rank 2 on node3 vanished", (1, 2, 4)),
    "a rank takes too much memory, and the kernel ends it": ("memory", 2, "rank 2 .* SIGKILL", (1, 2, 3, 4)),
}


@pytest.fixture
def cluster(cluster_of: Callable[..., Iterator[Cluster]], request: pytest.FixtureRequest) -> Iterator[Cluster]:
    yield from cluster_of(f"survival-{abs(hash(request.node.name))}", 4)


def on_slurm(cluster: Cluster, shared: Path, kind: str, struck: int, *asked: str) -> Outcome:
    """One fault, at step AT."""
    job = cluster.wait(submit(cluster, shared, kind, str(struck), str(AT), *asked), cwd=shared)
    return Outcome(job.output, shared)


def submit(
    cluster: Cluster,
    shared: Path,
    kinds: str,
    struck: str,
    at: str,
    *asked: str,
    length: int = STEPS,
    nodes: int = 4,
) -> str:
    """The job's id."""
    request = ["--site", f"{HERE}/site.yaml", "--nodes", str(nodes), "--ranks-per-node", "1", "--cpus-per-rank", "1"]
    options = [word for setting in asked or ASKED for word in ("--set", setting)]
    train = [*STRUCK.split(), str(length), kinds, struck, at]
    options += ["--walltime", "0:10:00", "--name", "t"]
    text = cluster.ok(["hpcddp", "render", *request, *options, "--", *train], cwd=shared)
    return cluster.submit(text, cwd=shared)


@pytest.mark.parametrize(
    "fault", [name if name.endswith("is cut") else pytest.param(name, marks=pytest.mark.slow) for name in FAULTS_HERE]
)
def test_a_job_on_slurm_goes_on(cluster: Cluster, shared: Path, fault: str, undisturbed: str) -> None:
    kind, struck, cause, hosts = FAULTS_HERE[fault]
    on_slurm(cluster, shared, kind, struck).assert_went_on(cause, hosts, undisturbed)
    assert_nothing_is_left(cluster)
    remove_memory_group(shared)


@pytest.mark.slow
def test_a_host_without_its_daemon_trains_on_and_is_left_out_of_the_next_start(
    cluster: Cluster, shared: Path, undisturbed: str
) -> None:
    outcome = Outcome(
        cluster.wait(submit(cluster, shared, "daemon,kill", "2,1", f"{AT - 3},{AT}"), cwd=shared).output, shared
    )
    outcome.assert_went_on("rank 1 on node2 was killed by SIGKILL", (1, 2, 4), undisturbed)
    assert "node3 is left out: it does not answer" in outcome.said


@pytest.mark.slow
def test_a_spare_takes_the_place_of_a_lost_host_and_after_the_next_loss_fewer_train(
    cluster: Cluster, shared: Path, undisturbed: str
) -> None:
    job = submit(cluster, shared, "cut,cut", "2,2", TWO, *ASKED, "spares=1", nodes=3)
    wait_until(lambda: "hpcddp: run t: finished" in output_of(shared, job))
    for host in ("node3", "node4"):  # this Slurm takes one host out of a job and no second one; it waits for both
        cluster.ok(["ip", "link", "set", "eth0", "up"], host=host, cwd=shared)
    Outcome(cluster.wait(job, cwd=shared).output, shared).assert_lost_two(undisturbed)


@pytest.mark.slow
def test_a_host_that_comes_back_finds_that_the_job_went_on(cluster: Cluster, shared: Path, undisturbed: str) -> None:
    on_slurm(cluster, shared, "return", 2).assert_went_on("node3 is silent", (1, 2, 4), undisturbed)
    wait_until(lambda: "UP" in cluster.ok(["ip", "-br", "link", "show", "eth0"], host="node3", cwd=Path("/")))
    assert_nothing_is_left(cluster)
    state = json.loads((shared / "runs/t/state.json").read_text())
    assert (state["status"], state["weights_sha256"]) == ("finished", undisturbed)


@pytest.mark.slow
def test_who_ends_a_job_during_its_recovery_has_ended_it(cluster: Cluster, shared: Path) -> None:
    job = submit(cluster, shared, "cut", "2", str(AT))
    wait_until(lambda: "the first cause" in output_of(shared, job))
    cluster.ok(["scancel", job], cwd=shared)
    # Slurm calls a job ended once all of its nodes have said so
    cluster.ok(["ip", "link", "set", "eth0", "up"], host="node3", cwd=shared)
    ended = cluster.wait(job, cwd=shared)
    assert ended.state == "CANCELLED"
    outcome = Outcome(ended.output, shared)
    assert (outcome.state["status"], outcome.state["step"]) == ("unfinished", 9)
    assert not (shared / "again").exists()
    assert_nothing_is_left(cluster)


def output_of(shared: Path, job: str) -> str:
    file = shared / f"job-{job}.out"
    return file.read_text() if file.exists() else ""
