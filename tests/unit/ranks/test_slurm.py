"""Slurm: the step's variables decide, and only in a task of a step."""

from __future__ import annotations

import pytest

from hpcddp.errors import LaunchError

from .captured import env_of, resolve

TASK = env_of("ranks/slurm-22.05-batch-srun", 3)  # rank 3 of 4 on node2, in a job of 2 nodes
SHELL = env_of("ranks/slurm-22.05-batch-plain")


@pytest.mark.parametrize("step", ["-5", "4294967290", "4294967291", "4294967292", "4294967280"])
def test_a_step_id_of_slurms_own_is_no_step(step: str) -> None:
    for env in (SHELL, TASK):
        with pytest.raises(LaunchError, match="not launched") as error:
            resolve(env | {"SLURM_STEP_ID": step})
        assert error.value.hint.startswith("srun --ntasks=4 ")


def test_a_step_of_1_task_that_kept_the_jobs_task_count_is_sallocs_shell() -> None:
    kept = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_NUM_NODES": "1"}
    env = TASK | kept | {"SLURM_STEP_NODELIST": "node1", "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}
    with pytest.raises(LaunchError, match="not launched"):
        resolve(env | {"SLURM_NTASKS": "4"})
    assert resolve(env | {"SLURM_NTASKS": "1"})[:3] == ("srun", 0, 1)


def test_the_jobs_task_count_is_not_the_world_size() -> None:
    assert resolve(TASK | {"SLURM_NTASKS": "64"}).world_size == 4


@pytest.mark.parametrize(
    ("node", "local_world_size"), [("0", 2), ("1", 2), ("2", 2), ("3", 1)], ids=["first", "second", "third", "last"]
)
def test_local_world_size_is_this_nodes_entry(node: str, local_world_size: int) -> None:
    uneven = {"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_NUM_NODES": "4"}
    env = TASK | uneven | {"SLURM_STEP_NODELIST": "node[1-4]", "SLURM_NODEID": node, "SLURM_LOCALID": "0"}
    assert resolve(env).local_world_size == local_world_size


@pytest.mark.parametrize(
    "change",
    [
        {"SLURM_PROCID": "4"},
        {"SLURM_LOCALID": "2"},
        {"SLURM_NODEID": "2"},
        {"SLURM_STEP_NUM_TASKS": "5"},
        {"SLURM_STEP_NUM_NODES": "3"},
        {"SLURM_STEP_NODELIST": "node[1-3]"},
        {"SLURM_STEP_TASKS_PER_NODE": "2"},
        {"SLURM_STEP_TASKS_PER_NODE": "2 2"},
    ],
    ids=lambda change: "=".join(*change.items()),
)
def test_a_step_that_contradicts_itself_is_an_error_that_names_both(change: dict[str, str]) -> None:
    with pytest.raises(LaunchError) as error:
        resolve(TASK | change)
    assert next(iter(change)) in error.value.message


def test_this_host_must_be_the_steps_host_of_this_node_number() -> None:
    assert resolve(TASK, hostname="node2.cluster").rank == 3
    with pytest.raises(LaunchError, match="this host is node1, but SLURM_NODEID=1 is node2 in"):
        resolve(TASK, hostname="node1")
    with pytest.raises(LaunchError, match="this host is other, but"):
        resolve(TASK | {"SLURMD_NODENAME": "other"}, hostname="other")


def test_the_batch_shell_of_a_heterogeneous_job_names_no_task_count() -> None:
    with pytest.raises(LaunchError, match="not launched") as error:
        resolve(env_of("ranks/slurm-22.05-het-batch"))
    assert error.value.hint.startswith("srun hpcddp exec")


@pytest.mark.parametrize("variable", ["GROUP_RANK", "NODE_RANK", "PET_NODE_RANK"])
def test_a_nodes_number_that_was_exported_for_another_node_is_refused(variable: str) -> None:
    """A job script exports it once, on the first node, for all of them."""
    step = {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2"}
    env = TASK | step | {"SLURM_STEP_NODELIST": "node[1-2]", "SLURM_NODEID": "1", "SLURM_LOCALID": "0"}
    assert resolve(env | {variable: "1"}).node_rank == 1
    with pytest.raises(LaunchError, match=f"SLURM_NODEID says node_rank 1, but {variable}=0 is exported too") as caught:
        resolve(env | {variable: "0"})
    assert caught.value.hint.startswith(f"unset {variable}")
