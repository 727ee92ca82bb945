"""Rank 0's address is known, verified or None; its port is the same on all ranks of a launch and on no other's."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.errors import LaunchError
from hpcddp.ranks.launch import Launch
from hpcddp.ranks.predict import predict_environment
from hpcddp.ranks.rendezvous import Rendezvous, port_candidates

HOSTS = ["node1", "node2"]


def meet(env: dict[str, str], hostname: str | None = None, *, strict: bool = True) -> Rendezvous:
    return Launch(env, hostname, live=False, strict=strict).rendezvous


def world(launcher: str, rank: int = 3, **more: str) -> dict[str, str]:
    return predict_environment(launcher, HOSTS, [2, 2], rank) | more


def test_a_single_process_needs_none() -> None:
    assert meet({}) == Rendezvous(None, None, {})


def test_all_ranks_on_one_node_meet_on_loopback() -> None:
    assert meet(predict_environment("mpich", ["node1"], [4], 2)).master_addr == "127.0.0.1"


@pytest.mark.parametrize("given", ["node1", "node1.cluster", "node1-ib"])
def test_a_master_addr_that_can_be_rank_0s_host_is_taken(given: str) -> None:
    found = meet(world("srun", MASTER_ADDR=given))
    assert (found.master_addr, found.source["master_addr"]) == (given, "MASTER_ADDR")


@pytest.mark.parametrize("given", ["node2", "login", "127.0.0.1", "localhost", "10.0.0.7"])
def test_a_master_addr_that_contradicts_the_launcher_is_named_and_not_used(given: str) -> None:
    found = meet(world("srun", MASTER_ADDR=given))
    assert (found.master_addr, found.source["master_addr"]) == ("node1", "SLURM_STEP_NODELIST (first host)")
    assert given in found.remarks[0]


@pytest.mark.parametrize(("given", "address"), [("node1", "node1"), ("login", None), ("localhost", None)])
def test_a_master_addr_outside_the_allocation_is_not_believed(given: str, address: str | None, tmp_path: Path) -> None:
    nodefile = tmp_path / "nodes"
    nodefile.write_text("node1\nnode2\n")
    env = world("env", MASTER_ADDR=given, PBS_JOBID="1.pbs", PBS_NODEFILE=str(nodefile))
    found = meet(env)
    assert found.master_addr == address
    assert bool(found.remarks) == (address is None)


def test_rank_0_stops_when_the_others_would_look_for_it_elsewhere(tmp_path: Path) -> None:
    nodefile = tmp_path / "nodes"
    nodefile.write_text("node1\nnode2\n")
    env = world("mpich", rank=0, PBS_JOBID="1.pbs", PBS_NODEFILE=str(nodefile), PMI_HOSTNAME="node2")
    with pytest.raises(LaunchError, match="rank 0 is on node2, but the other ranks will look for it on node1"):
        meet(env, hostname="node2")
    shown = meet(env, hostname="node2", strict=False)
    assert shown.master_addr is None
    assert "rank 0 is here" in shown.remarks[0]
    assert meet(env | {"PMI_HOSTNAME": "node1"}, hostname="node1").master_addr == "node1"


@pytest.mark.parametrize("rank", [0, 3])
def test_torchrun_says_both_itself_and_its_store_need_not_be_on_rank_0s_host(rank: int) -> None:
    found = meet(world("torchrun", rank, MASTER_ADDR="node1.cluster", MASTER_PORT="29500"), hostname="node2")
    assert found[:2] == ("node1.cluster", 29500)


@pytest.mark.parametrize("port", ["None", "0", "65536", "-1", "1e4", "\uff12\uff19"])
def test_a_master_port_that_is_no_port_is_an_error(port: str) -> None:
    with pytest.raises(LaunchError, match="MASTER_PORT="):
        meet(world("srun", MASTER_PORT=port))


def job(launcher: str, rank: int, **ids: str) -> int | None:
    return meet(world(launcher, rank) | ids).master_port


@pytest.mark.parametrize("launcher", ["srun", "openmpi", "mpich", "intelmpi", "env"])
def test_all_ranks_of_a_launch_find_the_same_port(launcher: str) -> None:
    ids = {"srun": {"SLURM_JOB_ID": "7"}, "openmpi": {"PMIX_NAMESPACE": "9@1"}, "intelmpi": {"I_MPI_HYDRA_UUID": "u"}}
    ports = {job(launcher, rank, **ids.get(launcher, {"PBS_JOBID": "7.pbs"})) for rank in range(4)}
    assert len(ports) == 1
    assert None not in ports


def test_another_job_step_array_element_or_attempt_has_another_port() -> None:
    srun = [{"SLURM_JOB_ID": "17"}, {"SLURM_JOB_ID": "18"}, {"SLURM_STEP_ID": "1"}, {"SLURM_RESTART_COUNT": "1"}]
    assert len({job("srun", 0, **{"SLURM_JOB_ID": "17"} | ids) for ids in srun}) == 4
    pbs = [{"PBS_JOBID": "48[1].s"}, {"PBS_JOBID": "48[2].s"}, {"HPCDDP_ATTEMPT": "48.1"}, {"HPCDDP_ATTEMPT": "48.2"}]
    assert len({job("mpich", 0, **ids) for ids in pbs}) == 4


def test_a_port_does_not_depend_on_what_only_some_ranks_have() -> None:
    # mpirun by ssh: its own node has the job's variables, the others none. mpirun in sbatch: its daemon has a step.
    namespace = {"PMIX_NAMESPACE": "prterun-node1-7@1"}
    here = job("openmpi", 0, PBS_JOBID="7.pbs", **namespace)
    assert here == job("openmpi", 3, **namespace)
    daemon = predict_environment("srun", HOSTS[1:], [1], 0) | {"SLURM_JOB_ID": "7"}
    assert here == job("openmpi", 3, **daemon, **namespace)


@pytest.mark.parametrize(
    ("env", "key", "because"),
    [
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}, "slurm|7|2", "SLURM_JOB_ID"),
        ({"SLURM_JOBID": "7"}, "slurm|7|", "SLURM_JOBID"),
        ({"PBS_JOBID": "7.pbs"}, "pbs|7.pbs|", "PBS_JOBID"),
        ({"PBS_NODEFILE": "/nowhere", "PBS_JOBID": "7.pbs", "JOB_ID": "8"}, "pbs|7.pbs|", "PBS_JOBID"),
        ({"JOB_ID": "7", "SGE_TASK_ID": "undefined", "RESTARTED": "0"}, "gridengine|7|0", "JOB_ID"),
        ({"JOB_ID": "7", "SGE_TASK_ID": "undefined", "RESTARTED": "1"}, "gridengine|7|1", "JOB_ID"),
    ],
)
def test_a_jobs_key_is_made_of_the_id_and_the_restarts_that_its_schedulers_row_names(
    env: dict[str, str], key: str, because: str
) -> None:
    ranks = world("mpich", **env)
    assert Launch(ranks, None, live=False).key == (key, because)


@given(st.text(), st.integers(1, 40))
def test_the_ports_of_a_key_are_different_and_the_first_of_more(key: str, count: int) -> None:
    ports = port_candidates(key, count)
    assert len(set(ports)) == len(ports) <= count
    assert all(12000 <= port < 32000 for port in ports)
    assert ports[:1] == port_candidates(key, 1)
