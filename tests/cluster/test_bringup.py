"""The cluster itself: its hosts are hosts of their own, and nothing of it outlives whoever brought it up."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from bringup.hosts import address_of
from livecluster import HERE, Cluster, wait_until

pytestmark = pytest.mark.cluster


def test_hosts_have_their_own_name_address_tmp_and_processes(cluster: Cluster, shared: Path) -> None:
    script = "hostname; hostname -f; hostname -I; touch /tmp/of-$(hostname); ls /tmp | grep ^of-"
    script += "; tr '\\0' '\\n' < /proc/1/cmdline | sed -n 4p"  # bash, host.sh, the state's folder, the host's name
    for host in ("node1", "node4"):
        said = cluster.ok(["sh", "-c", script], host=host, cwd=shared).split()
        assert said == [host, f"{host}.cluster", address_of(host), f"of-{host}", host]


def test_hosts_see_each_other_and_nothing_else(cluster: Cluster, shared: Path) -> None:
    routes = cluster.ok(["ip", "route"], host="node1", cwd=shared).splitlines()
    assert len(routes) == 1
    assert routes[0].startswith("10.66.0.0/24 dev eth0")
    assert cluster.ok(["srun", "-N4", "hostname"], host="node3", cwd=shared).split().count("node4") == 1


@pytest.fixture
def second() -> Iterator[Path]:
    """The state folder of another cluster, beside the one that the tests run on."""
    state = Path(f"/var/tmp/hpcddp-cluster-second-{os.getpid()}")
    yield state
    subprocess.run([HERE / "cluster", "down"], env=os.environ | {"TESTCLUSTER_DIR": str(state)}, check=True)
    subprocess.run(["rm", "-rf", state], check=True)


def processes_in(state: Path) -> list[int]:
    """Every process on a host of that cluster: such a host has its /etc/slurm from there."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{state}/slurm" in (folder / "mountinfo").read_text():
                found.append(int(folder.name))
        except OSError:
            continue  # it has ended meanwhile
    return found


def assert_ends(state: Path) -> None:
    wait_until(lambda: not processes_in(state), lambda: processes_in(state))


def hold_one(state: Path) -> subprocess.Popen[str]:
    """Hold a cluster of one node, beside a process that holds its standard input, and wait until it is up."""
    # whoever runs the tests in the background or by nohup has signals ignored, and children inherit that
    line = ["env", "--default-signal", "sh", "-c", f"sleep 1000 | {HERE}/cluster hold -n 1; echo left"]
    started = subprocess.Popen(
        line,
        env=os.environ | {"TESTCLUSTER_DIR": str(state)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert started.stdout is not None
    assert started.stdout.readline() == "ready\n"
    assert len(processes_in(state)) >= 7  # two hosts, each with its first process; munged, slurmctld, slurmd
    return started


def test_a_cluster_ends_with_whoever_holds_it(second: Path) -> None:
    held = hold_one(second)
    sleeper = subprocess.run(["pgrep", "-s", str(held.pid), "sleep"], capture_output=True, text=True).stdout
    os.kill(int(sleeper), signal.SIGKILL)
    out, _ = held.communicate(timeout=600)
    assert out == "left\n"
    assert processes_in(second) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_cluster_ends(second: Path, number: int) -> None:
    held = hold_one(second)
    os.killpg(held.pid, number)
    held.communicate(timeout=600)
    assert_ends(second)


def test_a_stale_cluster_is_taken_down_before_the_next_comes_up(second: Path) -> None:
    held = hold_one(second)
    os.killpg(held.pid, signal.SIGKILL)
    held.communicate(timeout=600)
    stale = processes_in(second)
    assert stale  # nobody was left to take it down
    again = hold_one(second)
    assert not set(stale) & set(processes_in(second))
    os.killpg(again.pid, signal.SIGTERM)
    again.communicate(timeout=600)
    assert_ends(second)
