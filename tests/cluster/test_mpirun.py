"""mpirun over several hosts: every rank finds what MPI itself says of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from livecluster import PLACE, PYTHON, Cluster, assert_is_mpi
from mpis import Mpi

pytestmark = pytest.mark.cluster

LAYOUTS = {
    "block": ({"node1": 2, "node2": 2}, 4, False),
    "cyclic": ({"node1": 2, "node2": 2}, 4, True),
    "uneven": ({"node3": 3, "node1": 1}, 4, False),
    "oversubscribed": ({"node1": 2, "node2": 1}, 6, False),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_over_hosts_are_what_mpi_says(cluster: Cluster, shared: Path, mpi: Mpi, layout: str) -> None:
    slots, ranks, cyclic = LAYOUTS[layout]
    mpirun = mpi.over_hosts(slots, ranks, shared, cyclic=cyclic)
    cluster.ok([*mpirun, PYTHON, PLACE, str(shared), "mpi"], cwd=shared, env=mpi.env)
    places = cluster.places(shared)
    assert len(places) == ranks
    assert_is_mpi(places, mpi.launcher, ranks)
