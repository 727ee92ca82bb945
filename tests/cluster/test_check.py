"""`hpcddp check` on real hosts under a real Slurm and mpirun: each fault is made on node3, and found there by name."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from bringup.hosts import enter
from livecluster import HERE, Cluster
from mpis import find_mpi

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("check")]  # one worker makes the cluster of this file

SRUN = ["srun", "-N4", "-n4", "--ntasks-per-node=1"]
SICK = "node3"
# Imported in a moment, and enough for the worker: tests with this are not about the real one's speed.
TORCH = """
__version__ = "2.9.1"
class version: cuda = hip = None
class cuda:
    device_count = is_available = staticmethod(lambda: 0)
class zeros:
    nbytes = 1 << 20
    def __init__(self, *_size, device=None): ...
def set_num_threads(_number): ...
def device(*_of): ...
"""
DISTRIBUTED = """
class TCPStore:
    port = 1
    def __init__(self, *_words, **_options): ...
def init_process_group(*_words, **_options): ...
send = recv = all_reduce = destroy_process_group = init_process_group
"""


@pytest.fixture(scope="module")
def cluster(cluster_of: Callable[..., Iterator[Cluster]]) -> Iterator[Cluster]:
    """Of its own: hosts are broken."""
    yield from cluster_of("check", 4)


def check(cluster: Cluster, shared: Path, words: Sequence[str], *options: str, **env: str) -> dict[str, Any]:
    done = cluster.sh(["hpcddp", "check", "--json", "--patience", "20", *options, "--", *words], cwd=shared, env=env)
    said: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (0 if said["ok"] else 1), done.stderr
    return said


def named(said: dict[str, Any], host: str = SICK) -> dict[str, str]:
    """Name -> message of what is found on a host."""
    return {one["name"]: one["message"] for one in said["checks"] if one["host"] == host}


def on(shared: Path, text: str) -> list[str]:
    """srun of processes, of which the one on node3 does this first, in a mount namespace of its own."""
    (shared / "first.sh").write_text(f'if [ "$(hostname)" = {SICK} ]; then\n{text}\nfi\nexec "$@"\n')
    return [*SRUN, "unshare", "--mount", "bash", f"{shared}/first.sh"]


def in_host(cluster: Cluster, host: str, line: str) -> None:
    done = subprocess.run([*enter(cluster.state, host), "sh", "-ec", line], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr


def in_allocation(cluster: Cluster, shared: Path, *options: str) -> dict[str, Any]:
    """In an allocation, whose launcher the check finds by itself."""
    line = ["salloc", "-N4", "-n4", "hpcddp", "check", "--json", "--patience", "20", *options]
    done = cluster.sh(line, cwd=shared)
    said: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == 0, (said, done.stderr)
    assert said["hosts"] == dict.fromkeys(("node1", "node2", "node3", "node4"), "ok"), said
    return said


def test_a_job_without_a_fault_passes(cluster: Cluster, shared: Path) -> None:
    assert in_allocation(cluster, shared, "--fast")["ranks"] == 4


@pytest.mark.slow  # without torch: the test before; with another one: those below
def test_hosts_exchange_data_and_sum_it_up_by_torch(cluster: Cluster, shared: Path) -> None:
    said = in_allocation(cluster, shared)
    assert len(said["links"]) == 6
    assert said["means"] == "gloo"
    assert said["all_reduce_gbps"] > 0, said


@pytest.mark.parametrize("name", ["openmpi5", pytest.param("mpich", marks=pytest.mark.slow)])
def test_under_mpirun_each_host_is_checked(cluster: Cluster, shared: Path, name: str) -> None:
    mpi = find_mpi(name)
    hosts = {f"node{at}": 1 for at in (1, 2, 3)}
    said = check(cluster, shared, mpi.over_hosts(hosts, 3, shared), "--fast", "--hosts", "node1,node2,node4", **mpi.env)
    assert said["ranks"] == 3
    assert {host: state for host, state in said["hosts"].items() if state == "failed"} == {"node4": "failed"}
    assert named(said, "node4") == {"answer": "no process of the launch is there"}


#: What is done on node3 before the process starts there -> the checks that it is found by, with words of the message.
FAULTS = {
    "many": (
        """
mount -t tmpfs -o size=1m full /mnt && export TMPDIR=/mnt && head -c 1m /dev/zero > /mnt/full || :
mount -t tmpfs -o size=64m shm /dev/shm
mount -t tmpfs class /sys/class && mkdir -p /sys/class/infiniband/mlx5_0 && ulimit -l 64
ulimit -n 256
export NCCL_DEBUG=INFO GLOO_SOCKET_IFNAME=eth7
mount -t tmpfs other "$PWD"
""",
        {
            "disk": "nothing can be written to /mnt: No space left on device",
            "small shared memory": "/dev/shm has 64 MiB",
            "locked memory": "may lock 64 KiB of memory only",
            "open files": "may open 256 files",
            "environment": "NCCL_DEBUG is 'INFO', and not set in most",
            "interface": "GLOO_SOCKET_IFNAME=eth7 names no interface of node3",
            "folder": "is another folder here than on the checker's host",
        },
    ),
    "a name that does not resolve": (
        "echo 127.0.0.1 localhost > $PWD/hosts && mount --bind $PWD/hosts /etc/hosts",
        {"rank 0's name": "rank 0's host 'node1' does not resolve"},
    ),
    "a name of this host itself": (
        "echo 127.0.1.1 node1 node3 > $PWD/hosts && mount --bind $PWD/hosts /etc/hosts",
        {"rank 0's name": "rank 0's host 'node1' is 127.0.1.1 for node3: node3 itself"},
    ),
    "a shifted clock": (
        "export LD_PRELOAD=$(ls /usr/lib/*/faketime/libfaketime.so.1) FAKETIME=+90s FAKETIME_DONT_FAKE_MONOTONIC=1",
        {"clock": "s ahead of the first host's"},
    ),
    "a wrong rank": ("export RANK=1", {"ranks": "RANK=1 is exported too"}),
    "a slow host, by its control group": (
        """
group=/sys/fs/cgroup/cpu; [ -d $group ] || group=/sys/fs/cgroup
[ $group != /sys/fs/cgroup ] || echo +cpu > $group/cgroup.subtree_control
mkdir -p $group/hpcddp-check
if [ $group = /sys/fs/cgroup ]; then echo "20000 100000" > $group/hpcddp-check/cpu.max
else echo 20000 > $group/hpcddp-check/cpu.cfs_quota_us; fi
echo $$ > $group/hpcddp-check/cgroup.procs
""",
        {"CPUs": "its processes may use 0.2 CPUs, and"},
    ),
}


SLOW = "a name of this host itself"


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=pytest.mark.slow) if name == SLOW else name for name in FAULTS]
)
def test_a_fault_of_a_node_is_named(cluster: Cluster, shared: Path, fault: str) -> None:
    first, found = FAULTS[fault]
    said = check(cluster, shared, on(shared, first), "--fast")
    there = named(said)
    assert {name: words in there.get(name, "") for name, words in found.items()} == dict.fromkeys(found, True), said
    assert {host for host, state in said["hosts"].items() if state != "ok"} == {SICK}, said


def test_ranks_that_are_missing_or_there_twice_are_named(cluster: Cluster, shared: Path) -> None:
    by_hand = 'exec env -i PATH="$PATH" RANK=$((SLURM_PROCID == 2 ? 1 : SLURM_PROCID)) WORLD_SIZE=4 "$@"'
    said = check(cluster, shared, [*SRUN, "bash", "-c", by_hand, "by-hand"], "--fast")
    messages = [one["message"] for one in said["checks"] if one["name"] == "ranks"]
    twice, missing = sorted(messages)
    assert twice in {"rank 1 is on node2 and node3", "rank 1 is on node3 and node2"}
    assert missing == "rank 2 of 4 did not come"


def test_a_slow_host_is_named_by_its_links_and_a_slow_link_by_both_its_hosts(cluster: Cluster, shared: Path) -> None:
    slow = "root tbf rate 20mbit burst 32kbit latency 400ms"
    pids = [(cluster.state / f"hosts/node{at}/pid").read_text().strip() for at in (1, 2)]
    in_host(cluster, "login", f"ip link add cable1 netns {pids[0]} type veth peer name cable2 netns {pids[1]}")
    try:
        for at, other in ((1, 2), (2, 1)):
            route = f"ip route add 10.66.0.1{other}/32 dev cable{at} src 10.66.0.1{at}"
            in_host(cluster, f"node{at}", f"ip link set cable{at} up; {route}; tc qdisc add dev cable{at} {slow}")
        in_host(cluster, SICK, f"tc qdisc add dev eth0 {slow}")
        said = check(cluster, shared, SRUN)
    finally:
        in_host(cluster, SICK, "tc qdisc del dev eth0 root")
        in_host(cluster, "node1", "ip link del cable1")
    assert "all 3 of its links are slow: " in named(said)["slow host"], said
    (link,) = (one["message"] for one in said["checks"] if one["name"] == "slow link")
    assert {"node1", "node2"} == {word for word in link.replace(":", " ").split() if word.startswith("node")}, said
    assert said["hosts"]["node4"] == "ok"


def render(cluster: Cluster, shared: Path, nodes: int, command: list[str], *asked: str) -> str:
    """The script of a job whose nodes are checked first, with a stand-in for torch."""
    (shared / "torch-all/torch/distributed").mkdir(parents=True)
    (shared / "torch-all/torch/distributed/__init__.py").write_text(DISTRIBUTED)
    (shared / "torch-all/torch/__init__.py").write_text(TORCH)
    request = ["--site", f"{HERE}/site.yaml", "--nodes", f"{nodes}", "--ranks-per-node", "1", "--cpus-per-rank", "1"]
    settings = ("preflight=test $(hostname) != node3", f"pythonpath={shared}/torch-all", *asked)
    options = [word for one in settings for word in ("--set", one)]
    return cluster.ok(["hpcddp", "render", *request, *options, "--name", "t", "--", *command], cwd=shared)


def test_preflight_leaves_out_a_host_and_the_spare_one_takes_its_place(cluster: Cluster, shared: Path) -> None:
    where = ["sh", "-c", "touch $(hostname)-$RANK-of-$WORLD_SIZE"]
    text = render(cluster, shared, 3, where, "max_restarts=1", "spares=1")
    job = cluster.wait(cluster.submit(text, cwd=shared), cwd=shared)
    assert job.state == "COMPLETED", job.output
    assert "node3 is left out: own check: the job file's own check ended with status 1" in job.output
    assert {path.name for path in shared.glob("node*")} == {
        f"node{at}-{rank}-of-3" for rank, at in enumerate((1, 2, 4))
    }
    (report,) = (shared / "runs/t/attempts").glob("*/check.json")
    assert json.loads(report.read_text())["hosts"]["node3"] == "failed"


def test_preflight_ends_a_job_that_has_no_other_host_before_a_rank_is_started(cluster: Cluster, shared: Path) -> None:
    job = cluster.wait(cluster.submit(render(cluster, shared, 4, ["touch", "started"]), cwd=shared), cwd=shared)
    assert job.state == "FAILED", job.output
    why = "node3 is unfit, own check: the job file's own check ended with status 1"
    assert f"no rank was started: {why}" in job.output
    assert not (shared / "started").exists()
    assert why in " ".join(cluster.ok(["hpcddp", "status", "t"], cwd=shared).split())


def test_a_closed_port_is_named(cluster: Cluster, shared: Path) -> None:
    in_host(cluster, SICK, "ip rule add pref 10 ipproto tcp dport 23456 unreachable")
    try:
        said = check(cluster, shared, SRUN, "--fast", MASTER_PORT="23456")
    finally:
        in_host(cluster, SICK, "ip rule del pref 10")
    assert named(said) == {"rank 0's port": "rank 0 at node1 (10.66.0.11), port 23456: network is unreachable"}
