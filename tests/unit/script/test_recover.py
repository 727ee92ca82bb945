"""What a request says of going on after a loss: which keys go together, on how many nodes it works out, and how the
launcher's line is written again for the hosts that are left."""

from __future__ import annotations

import subprocess

import pytest

from hpcddp.errors import RequestError
from hpcddp.ranks.launchers import LAUNCHERS
from hpcddp.supervisor.order import Order, name_hosts
from tests.job_script import order_of

from .conftest import plan, script


def fits(site: str, **asked: object) -> tuple[int, ...]:
    found = plan(site, max_restarts="3", **asked)
    return (*found.fewer_nodes, found.nodes)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"min_nodes": "2"}, "--min_nodes: nothing is started again without max_restarts"),
        ({"spares": "1"}, "--spares: nothing is started again"),
        ({"stall_limit": "60s"}, "--stall_limit: nothing is started again"),
        ({"preflight": "true", "supervise": "false"}, "preflight needs the supervisor"),
        ({"max_restarts": "3", "min_nodes": "5"}, "min_nodes 5: the job has 4 nodes"),
        ({"max_restarts": "3", "independent": "true"}, "those of an independent job do not wait"),
        ({"max_restarts": "3", "supervise": "false"}, "max_restarts needs the supervisor"),
        ({"max_restarts": "0"}, "max_restarts"),
        ({"max_restarts": "3", "stall_limit": "60"}, "stall_limit"),
    ],
)
def test_keys_that_say_nothing_together_are_refused(asked: dict[str, str], said: str):
    with pytest.raises(RequestError, match=said):
        plan("generic-slurm", nodes="4", **asked)


@pytest.mark.parametrize("launcher", ["ibrun", "torchrun"])
def test_a_launcher_that_cannot_leave_out_a_host_starts_nothing_again(launcher: str):
    with pytest.raises(RequestError, match="ibrun cannot be told to leave out a lost node") as caught:
        plan("stampede3", nodes="2", walltime="1h", launcher=launcher, max_restarts="3")
    assert "--launcher intelmpi or openmpi or mpich" in caught.value.hint
    with pytest.raises(RequestError, match="ibrun cannot be told"):
        plan("stampede3", nodes="1", walltime="1h", launcher="ibrun", max_restarts="3")  # its line is not written again
    assert fits("stampede3", nodes="1", walltime="1h", launcher="torchrun") == (1,)
    assert fits("stampede3", nodes="2", walltime="1h", launcher="intelmpi") == (1, 2)


@pytest.mark.parametrize(
    ("asked", "numbers"),
    [
        ({}, (2, 3, 4)),
        ({"min_nodes": "1"}, (1, 2, 3, 4)),
        ({"min_nodes": "4"}, (4,)),
        ({"global_batch": "64"}, (2, 3, 4)),  # an uneven share is hpcddp's own affair
        ({"parallel": "data=-1,shard=4", "min_nodes": "2"}, (2, 4)),  # 2 ranks per node
        # a rank's share in the command has to come out even
        ({"global_batch": "64", "command": "python t.py {per_rank_batch}"}, (2, 4)),
    ],
)
def test_the_numbers_of_nodes_on_which_a_request_works_out(asked: dict[str, str], numbers: tuple[int, ...]):
    assert fits("generic-slurm", nodes="4", **asked) == numbers


def test_a_least_number_of_nodes_on_which_it_does_not_work_out_is_refused():
    with pytest.raises(RequestError, match="min_nodes 3: the request works out on 4 nodes only"):
        plan("generic-slurm", nodes="4", max_restarts="1", min_nodes="3", parallel="data=-1,shard=4")


def test_it_is_told_on_which_numbers_of_nodes_a_restart_works():
    told = plan("generic-slurm", nodes="4", max_restarts="3", spares="1", parallel="data=-1,shard=4").remarks
    assert "started again up to 3 times, on 2 or 4 nodes, and 1 spare node" in told
    for nodes, restarts in (("4", None), ("1", "3")):
        told = plan("generic-slurm", nodes=nodes, max_restarts=restarts).remarks
        assert not any("started again" in remark for remark in told)


@pytest.mark.parametrize(
    ("site", "directive"),
    [("generic-slurm", "#SBATCH --nodes=5\n"), ("generic-pbs", "#PBS -l select=5:"), ("generic-torque", "nodes=5:ppn")],
)
def test_spare_nodes_are_asked_for_and_not_trained_on(site: str, directive: str):
    text = script(site, nodes="4", max_restarts="3", spares="1")
    assert directive in text
    assert order_of(started(text)).line.nodes == 4
    assert "# Nodes 4," in text


def started(text: str) -> list[str]:
    """The words that the script's shell hands to the supervisor."""
    line = text[text.index("\nexec ") :].replace("exec ", "show ", 1)
    show = 'show() { printf "%s\\0" "$@"; }'
    shell = f"launcher=/mpi/bin/mpirun; HPCDDP_PYTHON=/py; rendezvous=n1:9; job_number=7; {show}\n{line}"
    env = {"PBS_NODEFILE": "/nodes", "PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": "/lib"}
    done = subprocess.run(["bash", "-c", shell], env=env, capture_output=True, text=True, check=True)
    words = done.stdout.split("\0")[:-1]
    return words[words.index("supervise") + 1 :]


def ask(site: str, **asked: object) -> Order:
    return order_of(started(script(site, nodes="4", max_restarts="3", **asked)))


def renamed(order: Order, *hosts: str) -> tuple[list[str], str]:
    return name_hosts(order.line.words, LAUNCHERS[order.launcher], order.line, hosts, "/hosts")


@pytest.mark.parametrize(
    ("site", "asked", "before", "after", "listed"),
    [
        (
            "abci3",
            {},
            "-np 32 --map-by ppr:8:node --bind-to none -hostfile /nodes",
            "-np 16 --map-by ppr:8:node -hostfile /hosts --bind-to none",
            "n1 slots=8\nn3 slots=8\n",
        ),
        ("generic-pbs", {"launcher": "mpich"}, "-n 8 -ppn 2 -f /nodes", "-n 4 -ppn 2 -f /hosts", "n1:2\nn3:2\n"),
        (
            "generic-pbs",
            {"launcher": "intelmpi"},
            "-n 8 -ppn 2 -machinefile /nodes",
            "-n 4 -ppn 2 -machinefile /hosts",
            "n1:2\nn3:2\n",
        ),
        ("polaris", {"walltime": "1h"}, "-n 16 --ppn 4", "-n 8 --ppn 4 --hostfile /hosts", "n1\nn3\n"),
        (
            "generic-slurm",
            {},
            "--nodes=4 --ntasks=8 --ntasks-per-node=2",
            "--nodes=2 --ntasks=4 --ntasks-per-node=2 --nodelist=/hosts",
            "n1\nn3\n",
        ),
    ],
)
def test_the_launcher_s_line_is_written_again_for_the_hosts_that_are_left(
    site: str, asked: dict[str, str], before: str, after: str, listed: str
):
    if site == "polaris":
        asked = {**asked, "account": "a", "queue": "debug-scaling"}
    order = ask(site, **asked)
    again, text = renamed(order, "n1", "n3")
    assert f" {before} " in " ".join(order.line.words)
    assert f" {after} " in " ".join(again)
    assert text == listed
    assert " ".join(again).replace(f" {after} ", f" {before} ") == " ".join(order.line.words)  # and nothing else


def test_an_edited_line_is_written_again_as_it_stands():
    text = script("generic-slurm", nodes="4", max_restarts="3")
    edited = text.replace("--ntasks=8 --ntasks-per-node=2", "-n16 -N 4 -w n1,n2 --exclusive")
    order = order_of(started(edited))
    assert (order.line.nodes, order.line.ranks_per_node, order.line.world_size) == (4, 4, 16)
    again, _ = renamed(order, "n1", "n2")
    assert again[1:6] == ["--nodes=2", "-n8", "-N", "2", "--nodelist=/hosts"]
    assert again[6] == "--exclusive"


def test_agents_and_containers_are_told_the_new_number_of_nodes():
    order = ask("generic-slurm", launcher="torchrun", command="python t.py $x")
    again, _ = renamed(order, "n1", "n2", "n3")
    assert "--nnodes=4" in order.line.words
    assert "--nnodes=3" in again
    assert "--nnodes=4" not in again
    assert (order.line.command[-1], again[-1]) == ("$x", "$$x")  # as the agent has to be given it
    own = ask("generic-slurm", command="torchrun --nnodes=4 train.py", ranks_per_node="2")
    again, _ = renamed(own, "n1", "n2", "n3")
    assert again[again.index("--nodes") + 1] == "3"
    assert tuple(again[-3:]) == own.line.words[-3:]  # the command itself is nobody's to change
    boxed = ask("generic-slurm", container="/image.sqsh", container_runtime="pyxis", python="/usr/bin/python3")
    again, _ = renamed(boxed, "n1", "n2")
    assert [word for word in again if "container" in word] == [word for word in boxed.line.words if "container" in word]
