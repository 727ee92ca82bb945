"""How ranks learn where rank 0 is when no variable tells them, and that taking leave of that channel harms nobody."""

from __future__ import annotations

import json
import sys
import uuid

import pytest

from .conftest import find_flavour

pytestmark = pytest.mark.multirank


def meet(run, flavour, programs, channel, ending, ranks=2, options=(), **env):
    """Start ranks that open a process group twice and end one after the other; status, and what each rank saw.

    The attempt is no other's: from its name comes the port, and launches of one name are one launch.
    """
    program = [sys.executable, programs / "rendezvous.py", channel, ending]
    env = flavour.env | {"OMP_NUM_THREADS": "1", "HPCDDP_ATTEMPT": f"local-{uuid.uuid4()}"} | env
    done = run([*flavour.mpirun(ranks), *options, *program], env=env)
    return done, [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


# Of two MPIs that are asked the same, the other one is asked in the long tests, or on several hosts in tests/cluster.
SLOW = pytest.mark.slow


@pytest.mark.parametrize("name", ["mpich", pytest.param("impi", marks=SLOW)])
def test_hydra_tells_a_port_that_rank_0_holds_and_early_leavers_kill_nobody(name, run, programs, repo):
    # MPICH's hosts are made up, and no variable names them.
    hosts = ("-launcher", "fork", "-hosts", "h1:1,h2:1") if name == "mpich" else ()
    done, seen = meet(run, find_flavour(name, repo), programs, "auto", "ends-late", options=hosts)
    assert done.returncode == 0, done.stderr
    assert sorted(s["rank"] for s in seen) == [0, 1]
    assert {s["total"] for s in seen} == {3.0}
    assert {s["channel"] for s in seen} == {"pmi"}
    assert [s["held"] for s in sorted(seen, key=lambda s: s["rank"])] == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mpich", "impi"])
def test_mpi_may_be_initialised_after_the_exchange(name, run, programs, repo):
    done, seen = meet(run, find_flavour(name, repo), programs, "pmi", "mpi-after")
    assert done.returncode == 0, done.stderr
    assert sorted(s["mpi"] for s in seen) == [[0, 2], [1, 2]]


@pytest.mark.slow
@pytest.mark.parametrize("channel", ["file", "mpi4py"])
def test_a_file_or_mpi_tells_it_where_asked_for(openmpi5, channel, run, programs, tmp_path):
    done, seen = meet(run, openmpi5, programs, channel, "ends-late", HPCDDP_RUN_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert {s["channel"] for s in seen} == {channel}
    assert len(seen) == 2
    assert not list(tmp_path.glob("rendezvous/*")), "the file is taken away when all have come"


def test_exec_asks_the_run_folder_where_no_variable_tells_it(mpich, run, programs, tmp_path):
    """Two made-up hosts: MPICH does not say who has rank 0, and exec may not speak PMI."""
    launch = [*mpich.mpirun(2), "-launcher", "fork", "-hosts", "h1:1,h2:1"]
    show = ["sh", "-c", "echo $RANK $MASTER_ADDR:$MASTER_PORT"]
    env = mpich.env | {"HPCDDP_RUN_DIR": str(tmp_path), "HPCDDP_ATTEMPT": f"local-{uuid.uuid4()}"}
    done = run([*launch, sys.executable, "-m", "hpcddp", "exec", "--", *show], env=env)
    assert done.returncode == 0, done.stderr
    ranks, masters = zip(*sorted(line.split() for line in done.stdout.splitlines()), strict=True)
    assert ranks == ("0", "1")
    assert len(set(masters)) == 1
    without = run([*launch, sys.executable, "-m", "hpcddp", "exec", "--", *show], env=mpich.env)
    assert without.returncode == 4
    assert "does not say MASTER_ADDR (rank" in without.stderr
