"""Each check finds its fault, and says nothing where all is well or nothing can be known."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hpcddp.checks.environment import Machine, look_at_machine, run_checks
from hpcddp.ranks.launch import Launch
from hpcddp.ranks.predict import predict_environment

HOSTS = ["node1", "node2"]
NODE = Machine(cpus=16, cores=64, memlock=-1, infiniband=True, interfaces=("lo", "eth0", "ib0"))


def named(launcher: str, machine: Machine = NODE, **more: str) -> list[str]:
    env = predict_environment(launcher, HOSTS, [2, 2], 3) | more
    launch = Launch(env, None, live=False)
    return [check.name for check in run_checks(env, launch.info, launch.rendezvous, machine)]


@pytest.mark.parametrize("launcher", ["srun", "openmpi", "mpich", "intelmpi", "torchrun"])
def test_a_sound_rank_is_told_nothing(launcher: str) -> None:
    assert named(launcher, OMP_NUM_THREADS="8", NCCL_SOCKET_IFNAME="ib") == []
    assert named(launcher, Machine(), OMP_NUM_THREADS="800", NCCL_SOCKET_IFNAME="x") == []


@pytest.mark.parametrize(
    ("outer", "found"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, ["one torchrun per node"]),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, []),
        ({"SLURM_STEP_TASKS_PER_NODE": "nonsense"}, []),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, ["one torchrun per node"]),
    ],
)
def test_a_torchrun_in_every_task_is_found(outer: dict[str, str], found: list[str]) -> None:
    env = predict_environment("torchrun", HOSTS, [2, 2], 3)
    launch = Launch(env, None, live=False)
    checks = run_checks(env | outer, launch.info, launch.rendezvous, NODE)
    assert [check.name for check in checks] == found


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ({"SLURM_CPUS_PER_TASK": "32"}, ["CPUs of srun's tasks"]),
        ({"SLURM_CPUS_PER_TASK": "16"}, []),
        ({"SLURM_CPUS_PER_TASK": "32", "SRUN_CPUS_PER_TASK": "32"}, []),
    ],
)
def test_an_srun_that_forgets_sbatchs_cpus_is_found(more: dict[str, str], found: list[str]) -> None:
    assert named("srun", **more) == found


@pytest.mark.parametrize(("threads", "found"), [("32", []), ("33", ["threads"]), ("64,2", ["threads"]), ("", [])])
def test_too_many_threads_are_found(threads: str, found: list[str]) -> None:
    assert named("mpich", OMP_NUM_THREADS=threads) == found


def test_one_thread_for_each_rank_is_never_too_many() -> None:
    assert named("mpich", NODE._replace(cores=1), OMP_NUM_THREADS="1") == []
    assert named("mpich", NODE._replace(cores=1), OMP_NUM_THREADS="2") == ["threads"]


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0"}, ["GPUs of a node"]),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, []),
        ({"CUDA_VISIBLE_DEVICES": "0", "SLURMD_TRES_BIND": "gpu:per_task:1"}, ["GPUs of a node"]),
        ({"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_ON_NODE": "1"}, []),
    ],
)
def test_a_cgroup_per_gpu_is_found(more: dict[str, str], found: list[str]) -> None:
    assert named("srun", **{"SLURM_GPUS_PER_TASK": "1", "SLURM_GPUS_ON_NODE": "4", **more}) == found


def test_a_limit_of_locked_memory_is_found_where_there_is_infiniband() -> None:
    assert named("mpich", NODE._replace(memlock=8 << 20)) == ["locked memory"]
    assert named("mpich", NODE._replace(memlock=8 << 20, infiniband=False)) == []


@pytest.mark.parametrize(
    ("value", "found"),
    [
        *[("eth", False), ("=eth0", False), ("hsn,eth", False), ("^lo", False)],
        *[("=eth", True), ("hsn", True), ("^eth,lo,ib", True)],
    ],
)
def test_an_nccl_interface_that_fits_none_is_found(value: str, found: bool) -> None:
    assert named("srun", NCCL_SOCKET_IFNAME=value) == (["NCCL's interface"] if found else [])


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ({"HTTPS_PROXY": "http://proxy:3128"}, True),
        ({"http_proxy": "http://proxy:3128", "no_proxy": "localhost,node2"}, True),
        ({"http_proxy": "http://proxy:3128", "no_proxy": "localhost, node1"}, False),
        ({"http_proxy": "http://proxy:3128", "MASTER_ADDR": "node1.hpc.test", "NO_PROXY": ".hpc.test"}, False),
        ({"http_proxy": "http://proxy:3128", "no_proxy": "*"}, False),
        ({"http_proxy": ""}, False),
    ],
)
def test_a_proxy_between_the_nodes_is_found(more: dict[str, str], found: bool) -> None:
    assert named("srun", **more) == (["proxy"] if found else [])


def test_this_process_bound_to_one_cpu_sees_one() -> None:
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
    code += "from hpcddp.checks.environment import look_at_machine; m = look_at_machine({}); print(m.cpus, m.cores)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    cpus, cores = done.stdout.split()
    assert cpus == "1"
    assert int(cores) >= 1
    assert look_at_machine({}).interfaces is None
    assert "lo" in (look_at_machine({"NCCL_SOCKET_IFNAME": "x"}).interfaces or ())


def test_env_says_it_on_stderr_and_with_json_in_the_object(tmp_path: object) -> None:
    env = predict_environment("mpich", ["node1"], [2], 0) | {"OMP_NUM_THREADS": "100000"}
    line = [sys.executable, "-m", "hpcddp", "env", "--hostname", "node1"]
    human = subprocess.run(line, env=env, capture_output=True, text=True, check=True)
    assert "warning: OMP_NUM_THREADS=100000 times 2 ranks on this node is more than its" in human.stderr
    assert "warning" not in human.stdout
    machine = subprocess.run([*line, "--json"], env=env, capture_output=True, text=True, check=True)
    assert machine.stderr == ""
    assert [warning["name"] for warning in json.loads(machine.stdout)["warnings"]] == ["threads"]


@pytest.mark.parametrize(
    ("more", "files", "found"),
    [
        ({"NCCL_NET": "AWS Libfabric"}, [], ["NCCL's plugin"]),
        ({"NCCL_NET": "AWS Libfabric"}, ["libnccl-net.so"], []),
        ({"NCCL_NET": "AWS Libfabric"}, ["libnccl-net-ofi.so.0"], []),
        ({"NCCL_NET": "AWS Libfabric"}, ["libnccl.so.2"], ["NCCL's plugin"]),
        ({"NCCL_NET": "AWS Libfabric", "NCCL_NET_PLUGIN": "/opt/x/plugin.so"}, [], []),
        ({"NCCL_NET": "Socket"}, [], []),
        ({}, [], []),
    ],
)
def test_a_network_plugin_that_is_not_there_is_found(
    more: dict[str, str], files: list[str], found: list[str], tmp_path: Path
) -> None:
    for name in files:
        (tmp_path / name).touch()
    env = more | {"LD_LIBRARY_PATH": f"/no/such/folder:{tmp_path}"}
    plugins = look_at_machine(env).nccl_plugins
    machine = Machine(cpus=16, cores=64, memlock=-1, interfaces=("eth0",), nccl_plugins=plugins)
    assert named("srun", machine, **env) == found
