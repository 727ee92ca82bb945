"""Ids of jobs: parsed, compared and spelled in every form that schedulers, attempts' names and people use."""

from __future__ import annotations

import pytest

from hpcddp.runs.lock import Holder
from hpcddp.schedulers.job_id import JobId, parse_id
from hpcddp.schedulers.registry import CurrentJob, find_current_job, find_scheduler


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


@pytest.mark.parametrize(
    ("one", "other", "is_same", "matches"),
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
def test_jobs_are_compared_whoever_has_written_their_ids(one: str, other: str, is_same: bool, matches: bool) -> None:
    a, b = parse_id(one), parse_id(other)
    assert (a.is_same(b), b.is_same(a), a.matches(b)) == (is_same, is_same, matches)


def test_slurms_own_number_of_an_arrays_job_means_that_job_alone() -> None:
    job = JobId("12_3", "12", "3", raw="15")
    assert parse_id("15").is_same(job)
    assert parse_id("15").matches(job)
    assert not parse_id("15_3").is_same(job)
    assert not parse_id("12").is_same(job)


@pytest.mark.parametrize(
    ("job", "indices", "matches"),
    [("12_7", "5-9%2", True), ("12_7", "1,3,7-9:2", True), ("12_8", "7-9:2", False), ("13_7", "5-9", False)],
)
def test_jobs_of_an_array_that_wait_together_match_each_of_them(job: str, indices: str, matches: bool) -> None:
    several = JobId(f"12_[{indices}]", "12", indices)
    assert (parse_id(job).matches(several), several.matches(parse_id(job))) == (matches, False)


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


PBS = {"PBS_JOBID": "48[3].pbs1", "PBS_ARRAY_INDEX": "3"}
SLURM = {"SLURM_JOB_ID": "4720", "SLURM_ARRAY_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": "0"}


@pytest.mark.parametrize(
    ("env", "job"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "12"}, CurrentJob("slurm", "12", "12")),
        ({"SLURM_JOBID": "12"}, CurrentJob("slurm", "12", "12")),
        (SLURM, CurrentJob("slurm", "4720", "4711-0", "0")),
        (SLURM | {"SLURM_JOB_ID": "4711"}, CurrentJob("slurm", "4711_0", "4711-0", "0")),
        ({"PBS_JOBID": "0.pbs1", "PBS_NODEFILE": "/x"}, CurrentJob("pbs", "0.pbs1", "0.pbs1")),
        (PBS, CurrentJob("pbs", "48[3].pbs1", "48-3.pbs1", "3")),
        ({"PBS_JOBID": "48-3.head", "PBS_ARRAYID": "3"}, CurrentJob("pbs", "48-3.head", "48-3.head", "3")),
        ({"PBS_ENVIRONMENT": "PBS_BATCH"}, CurrentJob("pbs", "", "")),
        ({"JOB_ID": "7", "SGE_TASK_ID": "undefined"}, CurrentJob("gridengine", "7", "7")),
        ({"JOB_ID": "7", "SGE_TASK_ID": "3"}, CurrentJob("gridengine", "7.3", "7-3", "3")),
        (SLURM | PBS, CurrentJob("slurm", "4720", "4711-0", "0")),
    ],
)
def test_the_job_around_a_process_is_found_by_its_environment(env: dict[str, str], job: CurrentJob | None) -> None:
    assert find_current_job(env) == job
    if job is not None and job.id:
        assert parse_id(job.name).is_same(parse_id(job.id)) == (job.id != "4720")


def test_a_scripts_own_scheduler_is_asked_for_where_an_environment_shows_two() -> None:
    assert find_current_job(SLURM | PBS, "pbs") == find_current_job(PBS)
    assert find_current_job(SLURM, "pbs") is None
