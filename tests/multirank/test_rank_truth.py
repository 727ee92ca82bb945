"""Under every real mpirun, each rank's place as hpcddp finds it is the one that MPI itself reports."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.multirank
EXEC = [sys.executable, "-m", "hpcddp", "exec", "--"]


def reports(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """What each rank wrote, ordered by the rank's number in MPI's world (torchrun: in torch's)."""
    found = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    assert len(list(folder.glob("rank-*.json"))) == ranks
    return found


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_the_environment_says_what_mpi_says(flavour, ranks, run, programs, tmp_path):
    whoami = [sys.executable, programs / "whoami.py", tmp_path]
    done = run([*flavour.mpirun(ranks), *whoami], env=flavour.env)
    assert done.returncode == 0, done.stderr
    for report in reports(tmp_path, ranks):
        assert report["library"].startswith(flavour.library)  # the witness is the launcher's own library
        assert report["hpcddp"] == {"launcher": flavour.launcher, **report["mpi"]}


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_exec_exports_what_mpi_says_and_one_master_for_all(flavour, ranks, run, programs, tmp_path):
    whoami = [*EXEC, sys.executable, programs / "whoami.py", tmp_path]
    done = run([*flavour.mpirun(ranks), *whoami], env=flavour.env)
    assert done.returncode == 0, done.stderr
    found = reports(tmp_path, ranks)
    for report in found:
        assert report["exported"] == report["mpi"]
        assert report["hpcddp"] == {"launcher": flavour.launcher, **report["mpi"]}  # also for what runs inside exec
    masters = {tuple(report["master"]) for report in found}
    assert len(masters) == 1
    assert None not in masters.pop()


def test_ranks_on_several_made_up_hosts_keep_their_local_numbers(mpich, run, programs, tmp_path):
    hosts = [*mpich.mpirun(4)[:1], "-launcher", "fork", "-hosts", "h1:2,h2:2", "-np", "4"]
    done = run([*hosts, sys.executable, programs / "whoami.py", tmp_path], env=mpich.env)
    assert done.returncode == 0, done.stderr
    places = [report["hpcddp"] for report in reports(tmp_path, 4)]
    assert [(p["rank"], p["local_rank"], p["local_world_size"]) for p in places] == [
        (0, 0, 2),
        (1, 1, 2),
        (2, 0, 2),
        (3, 1, 2),
    ]


@pytest.mark.parametrize("order", ["mpich in openmpi", "openmpi in mpich"])
def test_of_nested_mpiruns_the_inner_one_counts(order, mpich, openmpi5, run, programs, tmp_path):
    """One mpirun starts another of the other kind: both kinds of variables stand side by side, size 1 and size 2."""
    inner, outer = (mpich, openmpi5) if order.startswith("mpich") else (openmpi5, mpich)
    env = inner.env | {"MPIR_CVAR_PMI_VERSION": "1"}  # MPICH itself refuses to start beside PMIx variables
    shell = ["env", *(f"{name}={value}" for name, value in env.items())]
    whoami = [sys.executable, programs / "whoami.py", tmp_path]
    done = run([*outer.mpirun(1), *shell, *inner.mpirun(2), *whoami], env=outer.env)
    assert done.returncode == 0, done.stderr
    for report in reports(tmp_path, 2):
        assert report["mpi"]["world_size"] == 2
        assert report["hpcddp"] == {"launcher": inner.launcher, **report["mpi"]}


def test_of_two_launches_in_one_job_each_has_a_name_that_all_of_its_ranks_see(flavour, run, tmp_path):
    """Hosts that MPICH makes up, since its ranks have no variable for it: each has a process that starts its ranks."""
    hosts = ("-launcher", "fork", "-hosts", "h1:1,h2:1") if flavour.launcher == "mpich" else ()
    job = ["PBS_JOBID=47.pbs1", "PBS_ENVIRONMENT=PBS_BATCH"]  # for the ranks alone: some mpiexec ask for its hosts
    program = ["env", *job, sys.executable, "-m", "hpcddp", "env", "--json"]
    done = run([*flavour.mpirun(2), *hosts, *program], env=flavour.env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line)["source"]["master_port"] for line in done.stdout.splitlines() if line.startswith("{")]
    assert (len(found), len(set(found))) == (2, 1)
    assert "PBS_JOBID" not in found[0]
