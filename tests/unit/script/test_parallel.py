"""`parallel` of a job: checked against nodes and ranks before it is queued, and passed on to the ranks."""

from __future__ import annotations

import pytest

from hpcddp.errors import RequestError
from hpcddp.script.jobplan import plan_record

from .conftest import plan, script

ASKED = {"data": "-1", "shard": "8"}


def test_the_ranks_get_it_in_a_variable_that_the_launcher_forwards() -> None:
    lines = script("abci3", nodes="4", parallel=ASKED).splitlines()
    assert "export HPCDDP_PARALLEL=data=-1,shard=8" in lines
    assert any("-x HPCDDP_PARALLEL" in line for line in lines)
    assert "HPCDDP_PARALLEL" not in script("abci3", nodes="4")


def test_the_plan_has_it() -> None:
    assert plan_record(plan("abci3", nodes="4", parallel=ASKED))["parallel"] == "data=-1,shard=8"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"parallel": {"shard": "16"}}, ["shard=16 does not give 32 ranks", "--parallel fsdp"]),
        ({"parallel": {"data": "-1", "tensor": "2"}}, ["DDP over tensor parallel", "--parallel shard=-1,tensor=2"]),
        (
            {
                "parallel": {"shard": "-1", "tensor": "2"},
                "global_batch": "64",
                "command": ["t.py", "{micro_batch}", "{accumulation}"],
            },
            ["32 ranks alike", "has 16 data ranks"],
        ),
    ],
    ids=str,
)
def test_a_split_that_cannot_be_is_refused_before_the_job_is_queued(asked: dict[str, object], words: list[str]) -> None:
    with pytest.raises(RequestError) as error:
        plan("abci3", nodes="4", **asked)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_the_global_batch_is_dealt_to_the_data_ranks() -> None:
    job = plan("abci3", nodes="4", parallel={"shard": "-1", "tensor": "8"}, global_batch="4")
    assert any("4 = 4 ranks x 1" in remark for remark in job.remarks), job.remarks
    with pytest.raises(RequestError, match="cannot be split over 32 ranks"):
        plan("abci3", nodes="4", parallel="fsdp", global_batch="4")
