"""A hundred faults, drawn by chance from fixed seeds: no job ends wrong, and each has the weights of a quiet run."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from livecluster import Cluster
from struck_job import Outcome, assert_nothing_is_left, undisturbed_run
from test_survival import submit

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

JOBS, FAULTS_PER_JOB, APART = 20, 5, 5
STEPS = APART * (FAULTS_PER_JOB + 1)
CAUSES = {
    "kill": r"rank \d on node\d was killed by SIGKILL",
    "freeze": r"no rank gets on.*was stopped by a signal",
    "hang": r"no rank gets on.*stands at faults.py:\d+, in strike",
    "exit": r"rank \d on node\d ended with status 1",
    "leave": r"rank \d on node\d ended with status 0 while others still trained",
    "error": r"rank \d on node\d: ValueError: a value that no step can have",
    "companion": r"rank \d on node\d vanished",
    "save": r"rank 0 on node1 was killed by SIGKILL",
    "full": r"rank 0 on node1.*No space left",
    "glitch": "",  # nobody minds
    "cut": r"node\d is silent",
}


def draw(seed: int) -> list[tuple[str, int, int]]:
    """Kind, rank and step of each fault of a job. This Slurm gives one host of a job back, and no second one; rank 0 is
    on the script's."""
    chance = random.Random(seed)
    kinds = chance.choices([kind for kind in CAUSES if kind != "cut"], k=FAULTS_PER_JOB)
    if seed % 2:
        kinds[chance.randrange(FAULTS_PER_JOB)] = "cut"
    ranks = [{"save": 0, "full": 0, "cut": 1}.get(kind, chance.randrange(4)) for kind in kinds]
    steps = [APART * (number + 1) + chance.randrange(2) for number in range(FAULTS_PER_JOB)]
    return list(zip(kinds, ranks, steps, strict=True))


@pytest.fixture
def cluster(cluster_of: Callable[..., Iterator[Cluster]], request: pytest.FixtureRequest) -> Iterator[Cluster]:
    yield from cluster_of(f"chance-{request.node.callspec.params['seed']}", 4)


@pytest.fixture(scope="session")
def undisturbed(run: Callable[..., object], tmp_path_factory: pytest.TempPathFactory) -> str:
    return undisturbed_run(run, tmp_path_factory.mktemp("undisturbed"), STEPS)


@pytest.mark.parametrize("seed", range(JOBS))
def test_a_job_survives_whatever_comes(cluster: Cluster, shared: Path, seed: int, undisturbed: str) -> None:
    faults = draw(seed)
    kinds, ranks, steps = (",".join(map(str, column)) for column in zip(*faults, strict=True))
    asked = [f"max_restarts={FAULTS_PER_JOB}", "stall_limit=6s", "min_nodes=2"]
    job = cluster.wait(submit(cluster, shared, kinds, ranks, steps, *asked, length=STEPS), cwd=shared)
    outcome = Outcome(job.output, shared)
    expected = [CAUSES[kind] for kind, _, _ in faults if CAUSES[kind]]
    assert len(outcome.causes) == len(expected), f"{faults}\n{outcome.said}"
    for cause, pattern in zip(outcome.causes, expected, strict=True):
        assert re.search(pattern, cause), f"{faults}\n{outcome.said}"
    assert (outcome.state["status"], outcome.state["step"]) == ("finished", STEPS), outcome.said
    assert outcome.state["weights_sha256"] == undisturbed
    outcome.assert_steps_once(STEPS)
    assert_nothing_is_left(cluster)
