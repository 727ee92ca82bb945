"""The same weights, bit for bit, however ranks are spread over hosts, and on one rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from livecluster import PYTHON, Cluster

# one worker makes the cluster of this file
pytestmark = [pytest.mark.cluster, pytest.mark.first, pytest.mark.xdist_group("exact")]
SLOW = (
    pytest.mark.slow
)  # the same weights on other numbers of hosts, and on one host in tests/unit/training/test_exact.py

# BatchNorm, dropout, momentum; the learning rate's schedule; a first partial look at real images
TRAIN = "-m hpcddp train --model mobilenet_v3_small --limit-steps 3 --seed 4"


@pytest.fixture(scope="module")
def cluster(cluster_of: Callable[..., Iterator[Cluster]]) -> Iterator[Cluster]:
    """Eight nodes: one for each rank."""
    yield from cluster_of("eight", nodes=8)


def train(cluster: Cluster, shared: Path, nodes: int, ranks: int, *options: str) -> tuple[str, list[float]]:
    """The weights' hash and the losses of a run, started by srun from the login node."""
    name = f"{nodes}x{ranks // nodes}{''.join(options)}"
    srun = ["srun", f"--nodes={nodes}", f"--ntasks={ranks}", "--overcommit", "--mpi=none", PYTHON]
    train = [*TRAIN.split(), *options, "--run-dir", name]
    cluster.ok([*srun, "-m", "hpcddp", "exec", "--", PYTHON, *train], cwd=shared)
    (metrics,) = (shared / name).glob("attempts/*/metrics.jsonl")
    steps = [line for line in map(json.loads, metrics.read_text().splitlines()) if line["kind"] == "step"]
    (ranks_of,) = (shared / name).glob("attempts/*/versions.json")
    hosts = [rank["host"] for rank in json.loads(ranks_of.read_text())["ranks"]]
    assert (len(set(hosts)), len(hosts)) == (nodes, ranks)
    return json.loads((shared / name / "state.json").read_text())["weights_sha256"], [line["loss"] for line in steps]


def test_two_ranks_on_two_hosts_give_the_weights_of_one_rank(cluster: Cluster, shared: Path) -> None:
    assert train(cluster, shared, 2, 2, "--exact") == train(cluster, shared, 1, 1, "--exact")


@SLOW
def test_eight_ranks_on_1_2_4_and_8_hosts_give_the_weights_of_one_rank(cluster: Cluster, shared: Path) -> None:
    found = {nodes: train(cluster, shared, nodes, 8, "--exact") for nodes in (1, 2, 4, 8)}
    alone = train(cluster, shared, 1, 1, "--exact")
    assert found == dict.fromkeys((1, 2, 4, 8), alone)
    compared = cluster.ok([PYTHON, "-m", "hpcddp", "compare", "1x1--exact", "4x2--exact"], cwd=shared)
    assert compared.startswith("the same"), compared


@SLOW
def test_shards_within_two_hosts_and_over_both_give_the_weights_of_one_rank(cluster: Cluster, shared: Path) -> None:
    integer = ("--exact", "integer")
    alone = train(cluster, shared, 1, 1, *integer)
    assert {word: train(cluster, shared, 2, 4, *integer, "--parallel", word) for word in ("hsdp", "fsdp")} == {
        "hsdp": alone,
        "fsdp": alone,
    }
