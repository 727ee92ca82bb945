"""Ids of jobs: parsed, compared and spelled in every form that schedulers, attempts' names and people use."""

from __future__ import annotations

import pytest

from hpcddp.runs.holder import Holder
from hpcddp.schedulers.job_id import JobId, parse_id
from hpcddp.schedulers.registry import find_scheduler


@pytest.mark.parametrize(
    ("text", "number", "index", "name"),
    [
        ("12", "12", "", "12"),
        ("0.pbs1", "0", "", "0.pbs1"),
        ("12.3rd-server.org", "12", "", "12.3rd-server.org"),
        ("12[].pbs1", "12", "", "12-.pbs1"),
        ("12[3].pbs1", "12", "3", "12-3.pbs1"),
        ("12-3.pbs1", "12", "3", "12-3.pbs1"),
        ("12_3", "12", "3", "12-3"),
        ("12+0", "12", "", "12+0"),
        ("12.3", "12", "3", "12-3"),
        ("local-20261121T021237-77-2", "local-20261121T021237-77-2", "", "local-20261121T021237-77-2"),
        ("12-3.1", "12-3.1", "", "12-3.1"),
        ("train", "train", "", "train"),
        ("", "", "", ""),
    ],
)
def test_an_id_is_read_in_each_form(text: str, number: str, index: str, name: str) -> None:
    assert parse_id(text) == JobId(text, number, index)
    assert parse_id(text).name == name


@pytest.mark.parametrize("text", ["12", "12[3].pbs1", "12_3", "12.3", "local-20261121T021237-77"])
def test_what_names_a_job_is_told_from_what_names_a_run(text: str) -> None:
    assert parse_id(text).is_job
    assert not parse_id(f"train-{text}").is_job


@pytest.mark.parametrize(
    ("one", "other", "is_same", "covers"),
    [
        ("47", "47.pbs1", True, True),
        ("47_3", "47[3].pbs1", True, True),
        ("47.3", "47-3", True, True),
        ("47+1", "47", True, True),
        ("47[].pbs1", "47", True, True),
        ("47", "48", False, False),
        ("47", "47[3].pbs1", False, True),
        ("47[3].pbs1", "47", False, False),
        ("47_3", "47_33", False, False),
        ("local-1", "local-2", False, False),
        ("", "47", False, False),
    ],
)
def test_jobs_are_compared_whoever_has_written_their_ids(one: str, other: str, is_same: bool, covers: bool) -> None:
    a, b = parse_id(one), parse_id(other)
    assert (a.is_same(b), b.is_same(a), a.covers(b)) == (is_same, is_same, covers)


def test_slurms_own_number_of_an_arrays_job_means_that_job_alone() -> None:
    job = JobId("12_3", "12", "3", raw="15")
    assert parse_id("15").is_same(job)
    assert parse_id("15").covers(job)
    assert not parse_id("15_3").is_same(job)
    assert not parse_id("12").is_same(job)


@pytest.mark.parametrize(
    ("scheduler", "array", "spelled"),
    [("slurm", "12", "12_3"), ("pbs", "12[].pbs1", "12[3].pbs1"), ("gridengine", "12", "12.3")],
)
def test_one_job_of_an_array_is_spelled_as_its_scheduler_takes_it(scheduler: str, array: str, spelled: str) -> None:
    job = parse_id(array).at("3", find_scheduler(scheduler).commands.of_index)
    assert str(job) == spelled
    assert parse_id(spelled) == job


@pytest.mark.parametrize(
    ("scheduler", "job", "attempt", "expected"),
    [
        ("slurm", "12", "12.1", JobId("12", "12")),
        ("slurm", "15", "12-3.1", JobId("12_3", "12", "3", raw="15")),
        ("slurm", "12_9", "12-9.1", JobId("12_9", "12", "9")),
        ("pbs", "12[3].pbs1", "12-3.pbs1.2", JobId("12[3].pbs1", "12", "3")),
        ("gridengine", "12", "12-3.1", JobId("12.3", "12", "3")),
        ("slurm", "12", "local-20261121T021237-77", JobId("12", "12")),
        ("", "", "local-20261121T021237-77", parse_id("local-20261121T021237-77")),
    ],
)
def test_the_job_that_holds_a_run_is_known_with_its_index(
    scheduler: str, job: str, attempt: str, expected: JobId
) -> None:
    assert Holder(attempt, "node1", "", 1, "1", scheduler, job).id == expected
