"""What schedulers print of jobs, as it was recorded: read whole, cut off anywhere, and with anything in it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.schedulers.job_id import JobId
from hpcddp.schedulers.registry import find_scheduler
from hpcddp.schedulers.row import CommandAnswer, JobFound, JobsFound
from hpcddp.schedulers.run import ask_job_state, ask_jobs

CAPTURES = Path(__file__).parents[2] / "captures"
SQUEUE = json.loads((CAPTURES / "slurm/squeue.json").read_text())["stdout"]
ARRAYS = json.loads((CAPTURES / "pbs/arrays.json").read_text())["cases"]
GRIDENGINE = json.loads((CAPTURES / "gridengine/qstat.json").read_text())["cases"][0]["stdout"]


def parse(name: str, stdout: str, status: int = 0, stderr: str = "") -> JobsFound:
    row = find_scheduler(name)
    return row.commands.parse_jobs(CommandAnswer(status, stdout, stderr), row.states)


def qstat(command: str) -> str:
    return next(str(case["stdout"]) for case in ARRAYS if case.get("command") == command)


def by_id(found: JobsFound) -> dict[tuple[str, str], JobFound]:
    return {(job.id.number, job.id.array_index): job for job in found.jobs}


def at(text: str) -> int:
    return int(time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S")))


def test_slurm_says_what_waits_and_why_what_runs_until_when_and_how_the_others_ended() -> None:
    found = parse("slurm", SQUEUE)
    jobs = by_id(found)
    assert found.problem == ""
    assert len(jobs) == len(SQUEUE.splitlines())
    running = jobs["12", ""]
    assert (running.state, running.reason) == ("running", "")
    assert (running.starts, running.ends) == (at("2026-11-24T01:25:03"), at("2027-11-24T01:25:03"))
    assert (jobs["14", ""].state, jobs["14", ""].reason) == ("queued", "PartitionNodeLimit")
    assert (jobs["13", ""].state, jobs["13", ""].starts) == ("held", None)
    assert jobs["17", ""].starts == at("2026-11-24T02:25:03")
    assert jobs["15", "1,3,5,7,9"].state == "queued"
    assert (jobs["3", "2"].state, jobs["3", "2"].id) == ("finished", JobId("3_2", "3", "2", "5"))
    assert {jobs["6", ""].state, jobs["18", ""].state} == {"failed", "cancelled"}


def test_pbs_says_the_same_and_an_array_has_each_of_its_jobs() -> None:
    jobs = by_id(parse("pbs", qstat("qstat -t -f -F json '353[].pbs1'")))
    assert {index for _, index in jobs} == {"", "1", "2", "3"}
    one = jobs["353", "2"]
    assert (one.state, str(one.id), str(jobs["353", ""].id)) == ("running", "353[2].pbs1", "353[].pbs1")
    assert one.starts == at("2026-11-21T02:00:39")
    ended = by_id(parse("pbs", qstat("qstat -x -f -F json '353[2].pbs1'")))["353", "2"]
    assert (ended.state, ended.status) == ("cancelled", 271)


@pytest.mark.parametrize(("status", "stderr", "problem"), [
    (153, "qstat: Unknown Job Id 99999.pbs1\n", ""),
    (35, "qstat: 380.pbs1 Job has finished, use -x or -H to obtain historical job information\n", ""),
    (255, "Unknown Host.\nqstat: cannot connect to server nosuchhost (errno=15008)\n",
     "qstat: qstat: cannot connect to server nosuchhost (errno=15008)"),
])  # fmt: skip
def test_pbs_a_job_that_is_not_known_is_no_problem_and_a_server_that_is_not_there_is(
    status: int, stderr: str, problem: str
) -> None:
    assert parse("pbs", "", status, stderr) == JobsFound((), problem)


_QSTAT = """{
@"timestamp":@1745411711,
@"pbs_server":@"pbs1",
@"Jobs":@{
@@"102.pbs1":@{
@@@"Job_Name":@"a",
@@@"job_state":@"Q",
ODD
@@@"comment":@"Not Running: Insufficient amount of resource: ncpus"
@@}
@}
}
"""


@pytest.mark.parametrize(
    "odd",
    [  # as OpenPBS prints what stands in a request
        r'"Submit_arguments":@"-v A=a\,b job.sh"',
        r'"Submit_arguments":@"-v A=\'x\' -N \"b\" C:\users job.sh\\"',
        '"Account_Name":@007',
        '"project":@-inf',
        '"Variable_List":@{\n@@@@"FOO":@005,\n@@@@"B":@"' + r"\'x\'" + '"\n@@@}',
        '"Job_Owner":@"u@@h"',
    ],
)
def test_pbs_what_is_no_json_in_a_job_takes_nothing_of_it_away(odd: str) -> None:
    found = parse("pbs", _QSTAT.replace("ODD", f"@@@{odd},").replace("@", "\t"))
    assert found.problem == ""
    assert [(str(job.id), job.state, job.reason[:11]) for job in found.jobs] == [("102.pbs1", "queued", "Not Running")]


@pytest.mark.parametrize(
    ("end", "is_reason"),
    [
        *[("", False), (" and finished", False), (" and failed", False)],
        *[(" and exceeded resource walltime", True), (" and terminated by alice@login", True)],
    ],
)
def test_pbs_where_a_job_ran_is_no_reason(end: str, is_reason: bool) -> None:
    comment = f"Job run at Wed Nov 25 at 20:25 on (node1:ncpus=4)+(node2:ncpus=4){end}"
    job = {"job_state": "F", "substate": 92, "Exit_status": 0, "comment": comment}
    assert parse("pbs", json.dumps({"Jobs": {"54.pbs1": job}})).jobs[0].reason == (comment if is_reason else "")


def test_pbs_a_job_that_waits_for_another_is_not_held_and_names_it() -> None:
    waits = {"job_state": "H", "Hold_Types": "s", "depend": "afterok:319.pbs1@pbs1:320.pbs1@pbs1,beforeok:9.pbs1@pbs1"}
    jobs = {"54.pbs1": waits, "55.pbs1": waits | {"Hold_Types": "us"}, "56.pbs1": {"job_state": "H"}}
    found = by_id(parse("pbs", json.dumps({"Jobs": jobs})))
    assert (found["54", ""].state, found["54", ""].reason) == ("queued", "waits for 319.pbs1, 320.pbs1")
    assert {found["55", ""].state, found["56", ""].state} == {"held"}


@pytest.mark.parametrize(
    ("reason", "after", "state", "says"),
    [
        ("Dependency", "afterany:12(unfulfilled),afterok:13_*(unfulfilled)", "queued", "waits for 12, 13"),
        ("Dependency", "", "queued", "Dependency"),
        ("DependencyNeverSatisfied", "afterok:12(failed)", "held", "DependencyNeverSatisfied: it waits for 12"),
        ("launch failed requeued held", "", "held", "launch failed requeued held"),
        ("JobHoldMaxRequeue", "", "held", "JobHoldMaxRequeue"),
        ("JobHeldUser", "", "held", "JobHeldUser"),
        ("Resources", "afterany:12(unfulfilled)", "queued", "Resources"),
    ],
)
def test_slurm_what_waits_for_a_person_is_held_and_what_waits_for_a_job_names_it(
    reason: str, after: str, state: str, says: str
) -> None:
    (found,) = parse("slurm", f"14|14|N/A|PENDING|N/A|N/A|{reason}|{after}|\n").jobs
    assert (found.state, found.reason) == (state, says)


@pytest.mark.parametrize("shown", ["102.pbs1", ""])
def test_a_job_that_an_answer_neither_shows_nor_names_as_unknown_is_asked_for_alone(tmp_path: Path, shown: str) -> None:
    """OpenPBS's qstat answers for its first id alone (since December 2023)."""
    answer = '{"Jobs": {"%s": {"job_state": "R"}}}'
    stand_in = tmp_path / "qstat"
    stand_in.write_text(
        f"""#!/bin/sh
echo "$@" >> {tmp_path}/asked
shift 5
for job; do case $job in 105*) echo "qstat: Unknown Job Id 105.pbs1" >&2 ;; esac; done
[ $# -gt 1 ] && {{ [ -z "{shown}" ] || echo '{answer % shown}'; exit 153; }}
case $1 in 104*) exit 153 ;; *) printf '{answer}\\n' $1 ;; esac
"""
    )
    stand_in.chmod(0o755)
    asked = ["102.pbs1", "103.pbs1", "104.pbs1", "105.pbs1"]
    found = ask_jobs("pbs", asked, {"PATH": f"{tmp_path}:/usr/bin:/bin"}, one_by_one=asked)
    assert ({str(job.id) for job in found.jobs}, found.problem) == ({"102.pbs1", "103.pbs1"}, "")
    lines = (tmp_path / "asked").read_text().splitlines()
    assert [line.split()[5:] for line in lines] == [asked, *([job] for job in asked[:3] if job != shown)]


def test_what_a_real_grid_engine_printed() -> None:
    recorded = json.loads((CAPTURES / "gridengine/qstat.json").read_text())["cases"]
    running, later, none = (by_id(parse("gridengine", case["stdout"])) for case in recorded[:3])
    assert {job: one.state for job, one in running.items()} == {
        ("1", ""): "running",
        ("2", ""): "suspended",
        ("3", "1"): "running",
        ("3", "2-6:1"): "queued",
        ("5", ""): "held",
        ("6", ""): "held",
        ("7", ""): "queued",
        ("8", ""): "held",
    }
    assert "error" in running["8", ""].reason
    assert [str(one.id) for (job, _), one in later.items() if job == "3" and one.state == "queued"] == [
        "3.2-4:1",
        "3.6",
    ]
    assert ("1", "") not in later
    assert none == {}


WHOLE = {
    "slurm": SQUEUE,
    "pbs": qstat("qstat -t -f -F json '353[].pbs1'"),
    "gridengine": GRIDENGINE,
}


@pytest.mark.parametrize("name", WHOLE)
@given(cut=st.floats(0, 1))
def test_output_that_is_cut_off_gives_whole_jobs_only_and_says_so(name: str, cut: float) -> None:
    text = WHOLE[name]
    whole = parse(name, text)
    part = text[: int(cut * len(text))]
    found = parse(name, part)
    assert set(found.jobs) <= set(whole.jobs)
    if len(found.jobs) < len(whole.jobs) and not part.endswith("\n") and part:
        assert found.problem


@pytest.mark.parametrize("name", ["slurm", "pbs", "gridengine"])
@given(text=st.text() | st.text('0123456789|{}[]<>":,\n\t', max_size=200), status=st.integers(0, 255))
def test_anything_is_an_answer_and_never_an_exception(name: str, text: str, status: int) -> None:
    found = parse(name, text, status, text)
    assert all(str(job.id)[:1].isdigit() and job.reason.isprintable() for job in found.jobs)
    assert "\n" not in found.problem


NO_HISTORY = (
    "qstat: PBS is not configured to maintain job history 353[].pbs1\n"  # openpbs, src/lib/Libifl/pbs_messages.c
)


def test_pbs_without_a_history_is_asked_again_for_what_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = tmp_path / "answer"
    answer.write_text(qstat("qstat -t -f -F json '353[].pbs1'"))
    stand_in = tmp_path / "qstat"
    stand_in.write_text(
        f"#!/bin/sh\ncase \" $* \" in *' -x '*) printf '{NO_HISTORY.rstrip()}\\n' >&2 ;; *) cat {answer} ;; esac\n"
    )
    stand_in.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    found = ask_jobs("pbs", ["353[].pbs1"], env)
    assert (len(found.jobs), found.problem) == (4, "")
    assert ask_job_state("pbs", "353[2].pbs1", env) == "running"
