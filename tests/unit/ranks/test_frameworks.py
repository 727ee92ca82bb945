"""What frameworks are handed beside torch's variables, and that the resolver does not take it for a launcher's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpcddp.errors import LaunchError
from hpcddp.ranks.frameworks import framework_variables, node_agent_variables
from hpcddp.ranks.launch import Launch
from hpcddp.ranks.launch_commands import find_node_agent
from hpcddp.ranks.launchers import LAUNCHERS

from .captured import resolve


def openmpi(rank: int, size: int, local_size: int, **more: str) -> dict[str, str]:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    values = (rank, size, rank % local_size, local_size)
    return {f"OMPI_COMM_WORLD_{n}": str(v) for n, v in zip(names, values, strict=True)} | more


def handed(env: dict[str, str], hostname: str = "a", gpus: int = 0, *, cpu_only: bool = False) -> dict[str, str]:
    return framework_variables(env, Launch(env, hostname, live=False), gpus=gpus, cpu_only=cpu_only)


def test_lightning_gets_the_size_of_the_launch() -> None:
    found = handed(openmpi(3, 4, 2))
    assert (found["PL_TRAINER_NUM_NODES"], found["PL_TRAINER_DEVICES"]) == ("2", "2")
    assert (found["LT_NUM_NODES"], found["LT_DEVICES"]) == ("2", "2")
    assert "LT_CLI_USED" not in found, "fabric.launch() would be refused"


@pytest.mark.parametrize(("size", "local", "gpus"), [(5, 2, 0), (4, 4, 2)])
def test_no_size_where_nodes_differ_or_ranks_share_a_gpu(size: int, local: int, gpus: int) -> None:
    assert not [name for name in handed(openmpi(1, size, local), gpus=gpus) if name.startswith(("PL_", "LT_"))]


def test_what_the_user_set_stays() -> None:
    own = {"PL_TRAINER_DEVICES": "1", "ACCELERATE_USE_CPU": "false", "TORCHELASTIC_RUN_ID": "hpcddp-mine"}
    assert handed(openmpi(1, 4, 2, **own), cpu_only=True).keys().isdisjoint(own)


@pytest.mark.parametrize("cpu_only", [True, False])
def test_accelerate_uses_the_cpu_only_where_there_is_nothing_else(cpu_only: bool) -> None:
    assert ("ACCELERATE_USE_CPU" in handed(openmpi(1, 4, 2), cpu_only=cpu_only)) is cpu_only


def test_the_nodes_number_is_that_of_its_host_in_the_job(tmp_path: Path) -> None:
    hosts = tmp_path / "nodes"
    hosts.write_text("a\nb\nc\n")
    job = {"PBS_JOBID": "1.server", "PBS_NODEFILE": str(hosts)}
    assert handed(openmpi(5, 6, 2, **job), "c.cluster")["NODE_RANK"] == "2"
    for variable in ("NODE_RANK", "PET_NODE_RANK", "GROUP_RANK"):
        assert variable not in handed(openmpi(5, 6, 2, **job, **{variable: "2"}), "c")
        with pytest.raises(LaunchError, match=f"this is node 2 of the launch, but {variable}=0 is exported too"):
            handed(openmpi(5, 6, 2, **job, **{variable: "0"}), "c")
    assert "NODE_RANK" not in handed(openmpi(3, 4, 2, **job), "c"), "the launch does not use all hosts"
    assert "NODE_RANK" not in handed(openmpi(3, 4, 2), "c"), "no job says which hosts there are"


def test_a_rank_with_all_of_it_is_still_its_launchers() -> None:
    env = openmpi(3, 4, 2)
    torch = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    inside = env | torch | handed(env, cpu_only=True)
    assert inside["TORCHELASTIC_RUN_ID"].startswith("hpcddp-")
    assert (resolve(inside).launcher, resolve(inside).rank) == ("openmpi", 3)
    plain = {name: value for name, value in inside.items() if not name.startswith("OMPI_")}
    assert (resolve(plain).launcher, resolve(plain).rank) == ("env", 3)


def test_an_agent_gets_its_node_and_where_all_meet() -> None:
    env = {"MASTER_ADDR": "a", "MASTER_PORT": "12345"}
    found = node_agent_variables(LAUNCHERS["torchrun"].reads, env, resolve(openmpi(1, 2, 1)), 2, 8)
    assert found["PET_NNODES"] == "2"
    assert "PET_STANDALONE" not in found
    assert found["PET_NODE_RANK"] == found["NODE_RANK"] == found["GROUP_RANK"] == "1"
    with pytest.raises(LaunchError, match="this is node 1 of the launch, but PET_NODE_RANK=0 is exported too"):
        node_agent_variables("torchrun", env | {"PET_NODE_RANK": "0"}, resolve(openmpi(1, 2, 1)), 2, 8)
    assert (found["PET_NPROC_PER_NODE"], found["PET_MASTER_ADDR"], found["PET_MASTER_PORT"]) == ("8", "a", "12345")


@pytest.mark.parametrize(
    ("nodes", "exported", "is_refused"),
    [
        (2, "PET_NNODES=1", True),
        (2, "PET_NPROC_PER_NODE=4", True),
        (2, "PET_MASTER_ADDR=localhost", True),
        (2, "PET_STANDALONE=1", True),
        (2, "PET_STANDALONE=0", False),
        (2, "PET_RDZV_BACKEND=c10d", True),
        (2, "PET_MAX_RESTARTS=3", False),
        (2, "NNODES=1", True),
        (1, "PET_STANDALONE=1", False),
        (1, "PET_MASTER_ADDR=localhost", False),
        (1, "PET_NNODES=2", True),
    ],
)
def test_a_variable_that_tells_an_agent_something_else_is_refused(nodes: int, exported: str, is_refused: bool) -> None:
    found = find_node_agent(["llamafactory-cli", "train", "sft.yaml"])  # it reads torchrun's and its own
    assert found is not None
    name, _, value = exported.partition("=")
    env = {"MASTER_ADDR": "a", "MASTER_PORT": "12345", name: value}
    place = resolve(openmpi(1, 2, 1) if nodes == 2 else openmpi(0, 1, 1))
    if is_refused:
        with pytest.raises(LaunchError, match=f"but {exported} is exported too") as caught:
            node_agent_variables(found[1].reads, env, place, nodes, 8)
        assert caught.value.hint == f"unset {name}"
    else:
        assert name not in node_agent_variables(found[1].reads, env, place, nodes, 8)


def test_an_agent_as_the_command_gets_its_variables_and_the_guard_those_of_its_ranks(run, tmp_path: Path) -> None:
    (tmp_path / "torchrun").write_text("#!/bin/sh\nexec env\n")
    (tmp_path / "torchrun").chmod(0o755)
    line = [
        sys.executable,
        *["-m", "hpcddp", "exec", "--nodes", "1", "--ranks-per-node", "4", "--", "torchrun", "train.py"],
    ]
    done = run(line, cwd=tmp_path, env={"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)})
    found = dict(line.partition("=")[::2] for line in done.stdout.splitlines())
    assert (found.get("PET_NNODES"), found.get("PET_NPROC_PER_NODE")) == ("1", "4"), done.stderr
    assert found["HPCDDP_RANK_MARKS"] == "TORCHELASTIC_RUN_ID"
