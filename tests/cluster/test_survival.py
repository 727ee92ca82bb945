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
    KILLED_HOST,
    STEPS,
    STRUCK,
    Outcome,
    assert_nothing_is_left,
    remove_memory_group,
)

pytestmark = [pytest.mark.cluster, pytest.mark.first]


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
    walltime: str = "0:10:00",
) -> str:
    """The job's id."""
    request = ["--site", f"{HERE}/site.yaml", "--nodes", "4", "--ranks-per-node", "1", "--cpus-per-rank", "1"]
    options = [word for setting in asked or ASKED for word in ("--set", setting)]
    train = [*STRUCK.split(), str(length), kinds, struck, at]
    options += ["--walltime", walltime, "--name", "t"]
    text = cluster.ok(["hpcddp", "render", *request, *options, "--", *train], cwd=shared)
    return cluster.submit(text, cwd=shared)


@pytest.mark.parametrize(
    "fault", [name if name.endswith("is cut") else pytest.param(name, marks=pytest.mark.slow) for name in FAULTS]
)
def test_a_job_on_slurm_goes_on(cluster: Cluster, shared: Path, fault: str, undisturbed: str) -> None:
    kind, struck, cause, hosts = FAULTS[fault]
    on_slurm(cluster, shared, kind, struck).assert_went_on(cause, hosts, undisturbed)
    assert_nothing_is_left(cluster)


@pytest.mark.slow
def test_a_job_on_slurm_goes_on_without_a_host_of_which_all_processes_are_gone(
    cluster: Cluster, shared: Path, undisturbed: str
) -> None:
    kind, struck, cause = KILLED_HOST
    on_slurm(cluster, shared, kind, struck).assert_went_on(cause, (1, 2, 4), undisturbed)


@pytest.mark.slow
def test_a_rank_that_takes_too_much_memory_is_ended_by_the_kernel_and_started_again(
    cluster: Cluster, shared: Path, undisturbed: str
) -> None:
    on_slurm(cluster, shared, "memory", 2).assert_went_on(
        "rank 2 on node3 was killed by SIGKILL", (1, 2, 3, 4), undisturbed
    )
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
def test_two_hosts_are_lost_one_after_the_other(cluster: Cluster, shared: Path, undisturbed: str) -> None:
    # with node3 gone, rank 2 is on node4
    job = submit(cluster, shared, "cut,cut", "2,2", f"{AT},{AT + 3}")
    wait_until(lambda: "hpcddp: run t: finished" in output_of(shared, job))
    for host in ("node3", "node4"):  # this Slurm takes one host out of a job and no second one; it waits for both
        cluster.ok(["ip", "link", "set", "eth0", "up"], host=host, cwd=shared)
    outcome = Outcome(cluster.wait(job, cwd=shared).output, shared)
    assert outcome.starts == ["node1, node2, node4", "node1, node2"], outcome.said
    assert [cause.split()[0] for cause in outcome.causes] == ["node3", "node4"]
    assert (outcome.state["status"], outcome.state["step"]) == ("finished", STEPS), outcome.said
    assert outcome.state["weights_sha256"] == undisturbed
    outcome.assert_steps_once()


@pytest.mark.slow
def test_a_host_that_comes_back_finds_that_the_job_went_on(cluster: Cluster, shared: Path, undisturbed: str) -> None:
    on_slurm(cluster, shared, "return", 2).assert_went_on("node3 is silent", (1, 2, 4), undisturbed)
    wait_until(lambda: "UP" in cluster.ok(["ip", "-br", "link", "show", "eth0"], host="node3", cwd=Path("/")))
    assert_nothing_is_left(cluster)
    state = json.loads((shared / "runs/t/state.json").read_text())
    assert (state["status"], state["weights_sha256"]) == ("finished", undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "cause"), [("save", "rank 0 on node1 was killed by SIGKILL"), ("full", "rank 0 on node1: .*No space left")]
)
def test_a_loss_during_a_save_leaves_the_checkpoint_before_it(
    cluster: Cluster, shared: Path, undisturbed: str, kind: str, cause: str
) -> None:
    outcome = on_slurm(cluster, shared, kind, 0)
    outcome.assert_went_on(cause, (1, 2, 3, 4), undisturbed)
    assert "from step 9" in outcome.said


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
