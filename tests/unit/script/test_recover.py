"""What a request says of going on after a loss: which keys go together, on how many nodes it works out, and how the
launcher's line is written again for the hosts that are left."""

from __future__ import annotations

import subprocess

import pytest

from hpcddp.errors import RequestError
from hpcddp.script.recover import plan_recovery
from hpcddp.script.render import render_script
from hpcddp.supervisor.order import Order, Recover, format_order, read_order
from hpcddp.supervisor.relaunch import rewrite_line

from .conftest import plan, script


def recovery(site: str, **asked: object) -> Recover:
    found = plan_recovery(plan(site, max_restarts="3", **asked))
    assert found is not None
    return found


def test_nothing_is_started_again_unless_it_is_asked_for():
    assert plan_recovery(plan("generic-slurm", nodes="4")) is None
    assert '"recover"' not in script("generic-slurm", nodes="4")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"min_nodes": "2"}, "--min_nodes: nothing is started again without max_restarts"),
        ({"spares": "1"}, "--spares: nothing is started again"),
        ({"stall_limit": "60s"}, "--stall_limit: nothing is started again"),
        ({"health_check": "nvidia-smi"}, "--health_check: nothing is started again"),
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
    assert recovery("stampede3", nodes="1", walltime="1h", launcher="torchrun").fits == (1,)
    assert recovery("stampede3", nodes="2", walltime="1h", launcher="intelmpi").fits == (1, 2)


def test_this_machine_has_no_spare_nodes():
    with pytest.raises(RequestError, match="this machine has no other nodes"):
        plan("local", max_restarts="3", spares="1")


@pytest.mark.parametrize(
    ("asked", "fits"),
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
def test_the_numbers_of_nodes_on_which_a_request_works_out(asked: dict[str, str], fits: tuple[int, ...]):
    assert recovery("generic-slurm", nodes="4", **asked).fits == fits


def test_a_least_number_of_nodes_on_which_it_does_not_work_out_is_refused():
    with pytest.raises(RequestError, match="min_nodes 3: the request works out on 4 nodes only"):
        plan("generic-slurm", nodes="4", max_restarts="1", min_nodes="3", parallel="data=-1,shard=4")


def test_what_is_asked_for_is_told():
    asked = plan("generic-slurm", nodes="4", max_restarts="3", spares="1", global_batch="64")
    assert "started again up to 3 times, on 2 or 3 or 4 nodes, and 1 spare node" in asked.remarks
    assert "on 2 nodes a rank takes 16 samples at once: max_micro_batch bounds it" in asked.remarks
    bounded = plan("generic-slurm", nodes="4", max_restarts="1", global_batch="64", max_micro_batch="8")
    assert not any("max_micro_batch" in remark for remark in bounded.remarks)


@pytest.mark.parametrize(
    ("site", "directive"),
    [("generic-slurm", "#SBATCH --nodes=5\n"), ("generic-pbs", "#PBS -l select=5:"), ("generic-torque", "nodes=5:ppn")],
)
def test_spare_nodes_are_asked_for_and_not_trained_on(site: str, directive: str):
    text = script(site, nodes="4", max_restarts="3", spares="1")
    assert directive in text
    assert '"nodes": 4' in text
    assert "# Nodes 4," in text


def test_an_order_is_read_as_it_was_written():
    ranks = {"nodes": 4, "ranks_per_node": 8, "world_size": 32}
    made = {"scheduler": "pbs", "name": "x", "command": ["a"], **ranks}
    order = Order("name: x\n", made, "openmpi", recover=recovery("abci3", nodes="4"))
    read = read_order(format_order(order))
    assert read.recover is not None
    assert read.recover.fits == (2, 3, 4)
    assert read.recover.request["nodes"] == 4
    assert format_order(read) == format_order(order)


def started(site: str, **asked: object) -> tuple[list[str], Order, Recover]:
    """The words that the script's shell makes of its launcher's line, and what the supervisor is told."""
    job = plan(site, nodes="4", max_restarts="3", **asked)
    text = render_script(job)
    line = text[text.index("\nexec ") :].replace("exec ", "show ", 1)
    show = 'show() { printf "%s\\0" "$@"; }'
    shell = f"launcher=/mpi/bin/mpirun; HPCDDP_PYTHON=/py; rendezvous=n1:9; job_number=7; {show}\n{line}"
    env = {"PBS_NODEFILE": "/nodes", "PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": "/lib"}
    done = subprocess.run(["bash", "-c", shell], env=env, capture_output=True, text=True, check=True)
    words = done.stdout.split("\0")[:-1]
    order = read_order(words[words.index("--") - 1])
    assert order.recover is not None
    return words[words.index("--") + 1 :], order, order.recover


ENV = {"LD_LIBRARY_PATH": "/lib", "PBS_NODEFILE": "/nodes"}


@pytest.mark.parametrize(
    ("site", "asked", "before", "after"),
    [
        (
            "abci3",
            {},
            "-np 32 --map-by ppr:8:node --bind-to none -hostfile /nodes",
            "-np 16 --map-by ppr:8:node --bind-to none -host n1:8,n3:8",
        ),
        (
            "generic-pbs",
            {"launcher": "mpich"},
            "-n 8 -ppn 2 -f /nodes",
            "-n 4 -ppn 2 -hosts n1:2,n3:2",
        ),
        (
            "generic-pbs",
            {"launcher": "intelmpi"},
            "-n 8 -ppn 2 -machinefile /nodes",
            "-n 4 -ppn 2 -hosts n1,n3",
        ),
        (
            "generic-slurm",
            {},
            "--nodes=4 --ntasks=8 --ntasks-per-node=2 --cpus-per-task=8 --kill-on-bad-exit=1",
            "--nodes=2 --ntasks=4 --ntasks-per-node=2 --cpus-per-task=8 --kill-on-bad-exit=1 --nodelist=n1,n3",
        ),
    ],
)
def test_the_launcher_s_line_is_written_again_for_the_hosts_that_are_left(
    site: str, asked: dict[str, str], before: str, after: str
):
    words, order, recover = started(site, **asked)
    assert rewrite_line(words, order.launcher, recover.request, (), ENV) == words
    again = rewrite_line(words, order.launcher, recover.request, ("n1", "n3"), ENV)
    assert f" {before} " in " ".join(words)
    assert f" {after} " in " ".join(again)
    assert " ".join(again).replace(f" {after} ", f" {before} ") == " ".join(words)  # and nothing else


def test_agents_and_containers_are_told_the_new_number_of_nodes():
    words, order, recover = started("generic-slurm", launcher="torchrun")
    again = rewrite_line(words, order.launcher, recover.request, ("n1", "n2", "n3"), ENV)
    assert "--nnodes=4" in words
    assert "--nnodes=3" in again
    assert "--nnodes=4" not in again
    own, order, recover = started("generic-slurm", command="torchrun --nnodes=4 train.py", ranks_per_node="2")
    again = rewrite_line(own, order.launcher, recover.request, ("n1", "n2", "n3"), ENV)
    assert again[again.index("--nodes") + 1] == "3"
    assert again[-3:] == own[-3:]  # the command itself is nobody's to change
    boxed, order, recover = started(
        "generic-slurm", container="/image.sqsh", container_runtime="pyxis", python="/usr/bin/python3"
    )
    again = rewrite_line(boxed, order.launcher, recover.request, ("n1", "n2"), ENV)
    assert [word for word in again if "container" in word] == [word for word in boxed if "container" in word]


def test_data_are_copied_to_the_hosts_that_are_left():
    words, order, recover = started("generic-slurm", stage_in="data", stage_dir="/local")
    stage = words[: words.index("--then")]
    again = rewrite_line(stage, order.launcher, recover.stage, ("n1", "n2"), ENV)
    assert again[:4] == ["srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1"]
    assert again[-3:] == stage[-3:]


def test_a_line_that_was_shortened_by_hand_is_refused():
    words, order, recover = started("generic-slurm")
    with pytest.raises(RequestError, match="changed after it was rendered"):
        rewrite_line(words[:3], order.launcher, recover.request, ("n1", "n2"), ENV)
