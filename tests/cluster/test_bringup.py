"""The cluster itself: its hosts are hosts of their own, and nothing of it outlives whoever brought it up."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from bringup.hosts import address_of
from livecluster import HERE, Cluster

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
