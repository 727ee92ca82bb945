"""One cluster of four nodes for all tests in this folder, taken down however they end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # bringup and livecluster, for the tests beside them

from livecluster import Cluster, Done  # noqa: E402  found through the line above
from mpis import NAMES, Mpi, find_mpi  # noqa: E402  the same
from struck_job import STEPS, undisturbed_run  # noqa: E402  the same

CLEARED_S = 15
# one cluster per run, so that two test runs do not take each other's down
STATE = Path(f"/var/tmp/hpcddp-cluster-tests-{os.getpid()}")


def hold(state: Path, nodes: int, net: str = "v4") -> subprocess.Popen[str]:
    """A cluster that lives as long as our end of its standard input: a killed pytest leaves nothing behind."""
    held = subprocess.Popen(
        [HERE / "cluster", "hold", "-n", str(nodes), "--net", net],
        env=os.environ | {"TESTCLUSTER_DIR": str(state)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for pytest, which then lets go in order
    )
    assert held.stdout is not None
    if held.stdout.readline() != "ready\n":
        let_go(held)
        pytest.fail(f"the cluster did not come up; its logs are in {state}/log", pytrace=False)
    return held


def let_go(held: subprocess.Popen[str]) -> None:
    held.communicate(timeout=600)


@pytest.fixture(scope="session")
def cluster(run: Callable[..., Done], request: pytest.FixtureRequest) -> Iterator[Cluster]:
    yield from lived_on(STATE, run, request, nodes=4)


def lived_on(
    state: Path, run: Callable[..., Done], request: pytest.FixtureRequest, nodes: int, net: str = "v4"
) -> Iterator[Cluster]:
    held = hold(state, nodes, net)
    try:
        yield Cluster(run, state)
    finally:
        let_go(held)
    if not request.session.testsfailed:  # else its logs and the jobs' files are wanted
        shutil.rmtree(state)


@pytest.fixture(scope="session")
def cluster_on(run: Callable[..., Done], request: pytest.FixtureRequest) -> Callable[[str], Iterator[Cluster]]:
    """Makes clusters of three nodes with other networks, for the `cluster` fixtures of single files."""
    return lambda net: lived_on(STATE.with_name(f"{STATE.name}-{net}"), run, request, 3, net)


@pytest.fixture(scope="session")
def cluster_of(run: Callable[..., Done], request: pytest.FixtureRequest) -> Callable[..., Iterator[Cluster]]:
    """Makes clusters of another size, by name, for the `cluster` fixtures of single files."""
    return lambda name, nodes: lived_on(STATE.with_name(f"{STATE.name}-{name}"), run, request, nodes)


@pytest.fixture
def shared(cluster: Cluster, request: pytest.FixtureRequest) -> Path:
    """A new folder that every host sees, which pytest's own tmp_path is not."""
    folder = cluster.state / "work" / "".join(c if c.isalnum() else "-" for c in request.node.name)
    folder.mkdir()
    return folder


@pytest.fixture(autouse=True)
def empty_queue(cluster: Cluster) -> Iterator[None]:
    """No test leaves jobs to the next one, nor nodes that Slurm still clears: the next job would get others."""
    yield
    end = time.monotonic() + CLEARED_S
    while cluster.ok(["squeue", "--noheader"], cwd=Path("/")) and time.monotonic() < end:  # a node that died stays
        cluster.sh(["scancel", "--user=root"], cwd=Path("/"))  # a job that completes may be refused
        time.sleep(0.1)


@pytest.fixture(params=NAMES)
def mpi(request: pytest.FixtureRequest) -> Mpi:
    return find_mpi(request.param)


@pytest.fixture(scope="session")
def undisturbed(run: Callable[..., Done], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights that a job of survival has to end with."""
    return undisturbed_run(run, tmp_path_factory.mktemp("undisturbed"), STEPS)
