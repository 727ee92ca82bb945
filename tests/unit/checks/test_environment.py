"""Each check finds its fault, and says nothing where all is well or nothing can be known."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from hpcddp.checks.environment import Machine, run_checks
from hpcddp.ranks.launch import Launch
from hpcddp.ranks.predict import predict_environment

HOSTS = ["node1", "node2"]
NODE = Machine(cpus=16, cores=64, memlock=-1, infiniband=True)


def named(launcher: str, machine: Machine = NODE, **more: str) -> list[str]:
    env = predict_environment(launcher, HOSTS, [2, 2], 3) | more
    launch = Launch(env, None, live=False)
    return [check.name for check in run_checks(env, launch.info, machine)]


@pytest.mark.parametrize("launcher", ["srun", "openmpi", "mpich", "intelmpi", "torchrun"])
def test_a_sound_rank_is_told_nothing(launcher: str) -> None:
    assert named(launcher, OMP_NUM_THREADS="8") == []
    assert named(launcher, Machine(), OMP_NUM_THREADS="800") == []


@pytest.mark.parametrize(
    ("outer", "found"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, ["one torchrun per node"]),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, []),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, ["one torchrun per node"]),
    ],
)
def test_a_torchrun_in_every_task_is_found(outer: dict[str, str], found: list[str]) -> None:
    env = predict_environment("torchrun", HOSTS, [2, 2], 3)
    launch = Launch(env, None, live=False)
    checks = run_checks(env | outer, launch.info, NODE)
    assert [check.name for check in checks] == found


#: Launcher, what is in the environment too, what is another in the machine -> the check that finds it, "": none.
CASES: list[tuple[str, dict[str, str], dict[str, object], str]] = [
    ("srun", {"SLURM_CPUS_PER_TASK": "32"}, {}, "CPUs of srun's tasks"),
    ("srun", {"SLURM_CPUS_PER_TASK": "16"}, {}, ""),
    ("srun", {"SLURM_CPUS_PER_TASK": "32", "SRUN_CPUS_PER_TASK": "32"}, {}, ""),
    ("mpich", {"OMP_NUM_THREADS": "32"}, {}, ""),
    ("mpich", {"OMP_NUM_THREADS": "33"}, {}, "threads"),
    ("mpich", {"OMP_NUM_THREADS": "64,2"}, {}, "threads"),
    ("mpich", {"OMP_NUM_THREADS": "1"}, {"cores": 1}, ""),
    ("mpich", {"OMP_NUM_THREADS": "2"}, {"cores": 1}, "threads"),
    ("mpich", {}, {"memlock": 8 << 20}, "locked memory"),
    ("mpich", {}, {"memlock": 8 << 20, "infiniband": False}, ""),
]


@pytest.mark.parametrize(("launcher", "env", "machine", "found"), CASES)
def test_what_is_wrong_is_found_by_name(launcher: str, env: dict, machine: dict, found: str) -> None:
    assert named(launcher, NODE._replace(**machine), **env) == ([found] if found else [])


def test_env_says_it_on_stderr_and_with_json_in_the_object(tmp_path: object) -> None:
    env = predict_environment("mpich", ["node1"], [2], 0) | {"OMP_NUM_THREADS": "100000"}
    line = [sys.executable, "-m", "hpcddp", "env", "--hostname", "node1"]
    human = subprocess.run(line, env=env, capture_output=True, text=True, check=True)
    assert "warning: OMP_NUM_THREADS=100000 times 2 ranks on this node is more than its" in human.stderr
    assert "warning" not in human.stdout
    machine = subprocess.run([*line, "--json"], env=env, capture_output=True, text=True, check=True)
    assert machine.stderr == ""
    assert [warning["name"] for warning in json.loads(machine.stdout)["warnings"]] == ["threads"]
