"""Of several launchers the innermost counts: by evidence, by rule, or not at all."""

from __future__ import annotations

import pytest

from hpcddp.errors import LaunchError
from hpcddp.ranks.candidates import find_candidates
from hpcddp.ranks.predict import predict_environment
from hpcddp.ranks.resolve import choose, weigh_parents

from .captured import resolve

HOSTS = ["node1", "node2"]


def world(launcher: str, ranks_per_node: list[int], rank: int) -> dict[str, str]:
    return predict_environment(launcher, HOSTS[: len(ranks_per_node)], ranks_per_node, rank)


DAEMON_ON_NODE2 = world("srun", [1, 1], 1)
HYDRA = world("mpich", [2, 2], 3)
OPENMPI = world("openmpi", [2, 2], 3)


@pytest.mark.parametrize("launcher", ["openmpi", "mpich", "intelmpi", "mvapich"])
def test_mpi_whose_daemons_srun_started_is_inside(launcher: str) -> None:
    assert resolve(DAEMON_ON_NODE2 | world(launcher, [2, 2], 3))[:3] == (launcher, 3, 4)


@pytest.mark.parametrize("outer", ["srun", "openmpi", "mpich", "intelmpi", "pals"])
def test_torchrun_whose_agents_are_the_outer_ranks_is_inside(outer: str) -> None:
    inner = world("torchrun", [2, 2], 3)
    assert resolve(world(outer, [1, 1], 1) | inner)[:3] == ("torchrun", 3, 4)


def test_torchrun_started_once_per_task_without_knowing_of_the_others_is_refused() -> None:
    with pytest.raises(LaunchError, match="two launchers say different things") as error:
        resolve(world("srun", [2, 2], 1) | world("torchrun", [2], 1))
    assert "HPCDDP_LAUNCHER=torchrun or HPCDDP_LAUNCHER=srun" in error.value.hint


def test_two_mpi_launchers_with_several_processes_each_are_refused_with_both_shown() -> None:
    with pytest.raises(LaunchError) as error:
        resolve(OPENMPI | world("mpich", [3], 1))
    assert "openmpi: rank 3 of 4" in error.value.message
    assert "mpich: rank 1 of 3" in error.value.message


def test_of_two_mpi_launchers_the_one_of_several_processes_counts() -> None:
    assert resolve(world("openmpi", [1], 0) | world("mpich", [2], 1)).launcher == "mpich"
    assert resolve(world("openmpi", [2], 1) | world("mpich", [1], 0)).launcher == "openmpi"


@pytest.mark.parametrize("launcher", ["openmpi", "mpich", "intelmpi", "torchrun"])
def test_processes_that_would_each_be_alone_are_refused(launcher: str) -> None:
    with pytest.raises(LaunchError, match=r"4 processes were started .* each is alone"):
        resolve(world("srun", [2, 2], 2) | world(launcher, [1], 0))


def test_one_open_mpi_rank_under_a_daemon_that_srun_started_on_each_node_is_one_rank() -> None:
    env = DAEMON_ON_NODE2 | world("openmpi", [1], 0) | {"PMIX_SERVER_URI41": "prterun-login-7@0.2;tcp4://10.0.0.1:1"}
    assert resolve(env)[:3] == ("openmpi", 0, 1)


def test_mpirun_typed_in_a_shell_of_srun_pty_is_inside() -> None:
    assert resolve(world("srun", [4], 0) | {"SLURM_PTY_PORT": "1"} | world("mpich", [4], 3))[:3] == ("mpich", 3, 4)


def test_srun_with_pmix_in_mpirun_is_inside_because_the_namespace_is_its_own() -> None:
    env = OPENMPI | world("srun", [2, 2], 1) | {"PMIX_NAMESPACE": "slurm.pmix.7.0", "PMIX_RANK": "1"}
    assert resolve(env)[:3] == ("srun", 1, 4)


def test_the_command_that_open_mpi_started_tells_that_a_launcher_is_inside() -> None:
    env = OPENMPI | world("mpich", [3], 1)
    assert resolve(env | {"OMPI_COMMAND": "/opt/mpich/bin/mpiexec"})[:3] == ("mpich", 1, 3)
    assert resolve(OPENMPI | world("srun", [2, 2], 1) | {"OMPI_COMMAND": "srun"})[:3] == ("srun", 1, 4)


@pytest.mark.parametrize(
    ("chain", "launcher"),
    [
        (["hydra_pmi_proxy", "mpiexec", "prterun", "bash"], "mpich"),
        (["bash", "hydra_pmi_proxy", "mpirun", "orted", "sshd"], "mpich"),
        (["prterun", "hydra_pmi_proxy", "mpiexec"], "openmpi"),
        (["prted", "slurmstepd"], "openmpi"),
        (["orted"], "openmpi"),
        (["mpirun", "bash"], "openmpi"),
    ],
)
def test_the_nearest_launcher_among_the_parents_counts(chain: list[str], launcher: str) -> None:
    evidence = weigh_parents([(9 + i, name) for i, name in enumerate(chain)])
    assert choose(find_candidates(OPENMPI | world("mpich", [3], 1)), {}, evidence)[0].row.name == launcher


def test_a_row_whose_program_is_nowhere_among_the_parents_is_a_leftover() -> None:
    submitted_from_a_rank = weigh_parents([(5, "slurm_script"), (4, "slurmstepd")])
    with pytest.raises(LaunchError, match=r"leftover of another launch: .* slurmstepd, pid 4") as error:
        choose(find_candidates(OPENMPI), {}, submitted_from_a_rank)
    assert "unset OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK" in error.value.hint
    assert choose(find_candidates(OPENMPI), {}, weigh_parents([(5, "orted"), (4, "slurmstepd")]))
    assert choose(find_candidates(OPENMPI), {}, weigh_parents([(5, "python3"), (4, "containerd-shim")]))
