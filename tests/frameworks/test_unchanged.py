"""Scripts of frameworks, with no word of hpcddp in them, are one world under `hpcddp exec`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.geteuid() == 0 else {}
EXEC = [sys.executable, "-m", "hpcddp", "exec", "--"]


def mpirun(repo: Path, ranks: int) -> list[str]:
    return [str(repo / ".venv/bin/mpirun"), "--map-by", "slot:OVERSUBSCRIBE", "-np", str(ranks)]


def environment(repo: Path) -> dict[str, str]:
    return {"PATH": f"{repo}/.venv/bin:/usr/bin:/bin", "OMP_NUM_THREADS": "1", **ROOT}


@pytest.mark.parametrize(
    "program", ["plain_ddp", "accelerate_loop", "hf_trainer", "lightning_trainer", "fabric_loop", "deepspeed_zero"]
)
def test_a_script_is_one_world(program, repo, run, tmp_path, check_world):
    line = [*mpirun(repo, 2), *EXEC, sys.executable, str(PROGRAMS / f"{program}.py"), str(tmp_path)]
    done = run(line, env=environment(repo))
    assert done.returncode == 0, done.stderr
    check_world(tmp_path, 2)


def test_without_what_exec_hands_on_each_rank_would_train_alone_and_the_guard_says_so(repo, run, tmp_path):
    line = [*mpirun(repo, 2), *EXEC, sys.executable, str(PROGRAMS / "accelerate_loop.py"), str(tmp_path), "10"]
    done = run(line, env=environment(repo) | {"ACCELERATE_USE_CPU": "false"})
    told = "rank 0 of 2 has made 64 optimizer steps, and nothing was sent in its process group"
    assert (done.returncode, done.stderr.count(told)) == (0, 1), done.stderr
    alone = run(line, env=environment(repo) | {"ACCELERATE_USE_CPU": "false", "HPCDDP_INDEPENDENT": "1"})
    assert (alone.returncode, told in alone.stderr) == (0, False), alone.stderr


@pytest.mark.parametrize(
    "command",
    [
        ["torchrun"],
        ["accelerate", "launch", "--multi_gpu", "--num_processes", "2"],
    ],
    ids=["torchrun", "accelerate launch"],
)
def test_a_command_that_makes_its_ranks_is_one_world(command, repo, run, tmp_path, check_world):
    path = f"{Path(sys.executable).parent}:{environment(repo)['PATH']}"
    launch = [sys.executable, "-m", "hpcddp", "launch", "--here", "--ranks-per-node", "2", "--name", "own", "--"]
    done = run(
        [*launch, *command, str(PROGRAMS / "plain_ddp.py"), str(tmp_path)], env={"PATH": path, **ROOT}, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check_world(tmp_path, 2)
