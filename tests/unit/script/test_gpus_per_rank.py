"""`gpus_per_rank` of a job: ranks with several GPUs each, for a model that is split over them."""

from __future__ import annotations

import pytest

from hpcddp.cli.layout import format_layout
from hpcddp.errors import RequestError
from hpcddp.script.jobplan import list_placements, plan_record

from .conftest import plan, script


def test_a_node_has_as_many_ranks_as_its_gpus_make_and_their_cpus_follow() -> None:
    job = plan("abci3", nodes="2", gpus_per_rank="2")
    assert (job.ranks_per_node, job.cpus_per_rank, job.world_size) == (4, 48, 8)
    assert [place.gpus for place in list_placements(job)][3:5] == [(6, 7), (0, 1)]
    lines = [line.split() for line in format_layout(job).splitlines()]
    assert ["rank", "node", "local", "rank", "GPUs", "CPUs"] in lines
    assert ["5", "1", "1", "2,3", "48"] in lines


def test_the_script_asks_for_these_ranks_and_tells_them() -> None:
    lines = script("abci3", nodes="2", gpus_per_rank="2").splitlines()
    assert "#PBS -l select=2:mpiprocs=4:ompthreads=24" in lines
    assert "export HPCDDP_GPUS_PER_RANK=2" in lines
    assert any("-x HPCDDP_GPUS_PER_RANK" in line for line in lines)
    slurm = script("generic-slurm", gpus_per_node="4", gpus_per_rank="2", cpus_per_rank=None, cpus_per_node="32")
    for line in ("--ntasks-per-node=2", "--gpus-per-node=4", "--cpus-per-task=16"):
        assert f"#SBATCH {line}" in slurm.splitlines()
    for asked in ({}, {"gpus_per_rank": "1"}):
        assert "HPCDDP_GPUS_PER_RANK" not in script("abci3", **asked)


def test_where_the_launcher_shows_each_rank_its_gpu_it_shows_all_of_them() -> None:
    asked = {"account": "a", "walltime": "1:00:00"}
    assert "--gpus-per-task=1 --gpu-bind=closest" in script("frontier", **asked)
    assert "--gpus-per-task=2 --gpu-bind=closest" in script("frontier", **asked, gpus_per_rank="2")


def test_it_is_kept() -> None:
    assert plan_record(plan("abci3", gpus_per_rank="2"))["gpus_per_rank"] == 2


@pytest.mark.parametrize(
    ("site", "asked", "words", "hint"),
    [
        ("abci3", {"gpus_per_rank": "3"}, "2 ranks per node take 6 GPUs, and a node has 8", "leave out gpus_per_rank"),
        (
            "abci3",
            {"gpus_per_rank": "2", "ranks_per_node": "8"},
            "8 ranks per node take 16 GPUs, and a node has 8",
            "leave out gpus_per_rank",
        ),
        ("abci3", {"gpus_per_rank": "2", "queue": "rt_HG"}, "a node has 1 GPU here", "leave out gpus_per_rank"),
    ],
)
def test_what_contradicts_the_node_or_its_ranks_is_refused(site: str, asked: dict, words: str, hint: str) -> None:
    with pytest.raises(RequestError) as caught:
        plan(site, **asked)
    assert words in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize("parallel", ["fsdp", "hsdp", "zero1", {"tensor": "2"}, "shard=8"], ids=str)
def test_several_gpus_per_rank_go_with_ddp_only(parallel: object) -> None:
    with pytest.raises(RequestError, match="gpus_per_rank 2 is for a model that its script puts on") as caught:
        plan("abci3", gpus_per_rank="2", parallel=parallel)
    assert caught.value.hint.startswith("leave out gpus_per_rank")
    assert caught.value.hint.endswith("or --parallel ddp")
    for accepted in ("ddp", {"data": "-1"}, "data=4,tensor=1"):
        assert plan("abci3", gpus_per_rank="2", parallel=accepted).data_size == 4
    assert plan("abci3", gpus_per_rank="1", parallel="fsdp").data_size == 8
