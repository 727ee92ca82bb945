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


HOSTS = ("-launcher", "fork", "-hosts", "h1:1,h2:1")  # made up, and no variable names them


@pytest.mark.parametrize("name", ["mpich", pytest.param("impi", marks=SLOW)])
def test_ranks_of_hydra_on_one_host_meet_by_the_environment_and_early_leavers_kill_nobody(name, run, programs, repo):
    done, seen = meet(run, find_flavour(name, repo), programs, "auto", "ends-late")
    assert done.returncode == 0, done.stderr
    assert sorted(s["rank"] for s in seen) == [0, 1]
    assert {s["total"] for s in seen} == {3.0}
    assert {s["channel"] for s in seen} == {"env"}


def test_ranks_of_hydra_on_several_hosts_need_the_run_folder_or_are_told_so(mpich, run, programs, tmp_path):
    done, seen = meet(run, mpich, programs, "auto", "ends-late", options=HOSTS, HPCDDP_RUN_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert {s["channel"] for s in seen} == {"file"}
    refused, _ = meet(run, mpich, programs, "auto", "ends-late", options=HOSTS)
    assert "launcher mpich does not give the 2 ranks the address of rank 0" in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mpich", "impi"])
def test_mpi_may_be_initialised_after_the_exchange(name, run, programs, repo):
    done, seen = meet(run, find_flavour(name, repo), programs, "auto", "mpi-after")
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
    launch = [*mpich.mpirun(2), *HOSTS]
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
