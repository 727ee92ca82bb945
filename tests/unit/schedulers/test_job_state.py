"""What became of a job, by the answers that the schedulers' commands were recorded or documented to give."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from hpcddp.errors import SchedulerError
from hpcddp.schedulers import run
from hpcddp.schedulers.job_id import parse_id
from hpcddp.schedulers.registry import find_scheduler
from hpcddp.schedulers.row import CommandAnswer, JobFound
from hpcddp.schedulers.run import ask_job, ask_job_state

SLURM_GONE = "slurm_load_jobs error: Invalid job id specified\n"


def pbs(**about: object) -> str:
    return json.dumps({"Jobs": {"41.pbs1": about}})


def say(folder: Path, program: str, answer: CommandAnswer) -> dict[str, str]:
    """An environment in which this command gives this answer."""
    (folder / "out").write_text(answer.stdout)
    (folder / "err").write_text(answer.stderr)
    text = f'[ "${{!#}}" = 41 ] || exit 9\ncat {folder}/out; cat {folder}/err >&2; exit {answer.status}\n'
    (folder / program).write_text(f"#!/bin/bash\n# a stand-in, no scheduler\n{text}")
    (folder / program).chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


@pytest.mark.parametrize(
    ("scheduler", "answer", "state"),
    [
        ("pbs", CommandAnswer(0, pbs(job_state="R", queue="workq"), ""), "running"),
        ("pbs", CommandAnswer(0, pbs(job_state="F", Exit_status=0), ""), "finished"),
        ("pbs", CommandAnswer(0, pbs(job_state="F", substate=91, Exit_status=271), ""), "cancelled"),
        ("pbs", CommandAnswer(153, "", "qstat: Unknown Job Id 41.pbs1\n"), "gone"),
        ("pbs", CommandAnswer(1, "", "Connection refused\nqstat: cannot connect to server pbs1 (errno=111)\n"), None),
        ("slurm", CommandAnswer(0, "JobId=41 JobName=x\n   JobState=COMPLETING Reason=None\n", ""), "exiting"),
        ("slurm", CommandAnswer(0, "   JobState=TIMEOUT Reason=TimeLimit\n", ""), "failed"),
        ("slurm", CommandAnswer(1, "", SLURM_GONE), "gone"),
        ("slurm", CommandAnswer(1, "", "slurm_load_jobs error: Unable to contact slurm controller\n"), None),
    ],
)
def test_the_answer_says_whether_a_job_has_ended(
    tmp_path: Path, scheduler: str, answer: CommandAnswer, state: str | None
) -> None:
    commands = find_scheduler(scheduler).commands
    assert ask_job_state(scheduler, "41", say(tmp_path, (commands.state or commands.jobs)[0], answer)) == state


def test_what_cannot_be_asked_is_not_known() -> None:
    assert ask_job_state("slurm", "41", {"PATH": "/nowhere"}) is None
    assert ask_job("pbs", "41", {"PATH": "/nowhere"}) is None


def test_the_end_of_a_pbs_job_is_its_start_and_its_walltime(tmp_path: Path) -> None:
    began = time.mktime((2026, 11, 21, 2, 0, 39, 0, 0, -1))
    runs = {"job_state": "R", "Resource_List": {"walltime": "30:00:10"}, "stime": "Sat Nov 21 02:00:39 2026"}

    def ask(**changed: object) -> int | None:
        found = ask_job("pbs", "41", say(tmp_path, "qstat", CommandAnswer(0, pbs(**{**runs, **changed}), "")))
        assert found is not None
        return found.runs_until

    assert ask() == began + 30 * 3600 + 10
    for changed in ({"Resource_List": {}}, {"stime": ""}, {"stime": "Sam. nov. 21 02:00:39 2026"}, {"job_state": "F"}):
        assert ask(**changed) is None


@pytest.fixture
def silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment in which sinfo, qsub and mpirun never answer, and nobody waits for them."""
    monkeypatch.setattr(run, "_PATIENCE_S", 0)
    for name in ("sinfo", "qsub", "mpirun"):
        (tmp_path / name).write_text("#!/bin/sh\nexec sleep 600\n")
        (tmp_path / name).chmod(0o755)
    return {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)}


def test_a_silent_program_is_an_error_with_what_to_try(silent: dict[str, str]) -> None:
    with pytest.raises(SchedulerError, match=r"sinfo has not answered in 0 s") as error:
        run.run_program(["sinfo", "--noheader"], silent)
    assert error.value.hint == "try it by hand: sinfo --noheader"


# scontrol show job of Slurm 22.05, recorded: while it runs, and in the SIGTERM of `scancel`
_RUNS = """JobId=6 JobName=t.sh
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   StartTime=2026-11-23T13:26:06 EndTime=2026-11-23T13:31:06 Deadline=N/A
"""
_CANCELLED = _RUNS.replace("RUNNING", "COMPLETING").replace(
    "EndTime=2026-11-23T13:31:06", "EndTime=2026-11-23T13:26:08"
)


def ask_slurm(text: str, env: dict[str, str] | None = None) -> JobFound:
    row = find_scheduler("slurm")
    found = row.commands.parse_job(parse_id("6"), CommandAnswer(0, text, ""), row.states, env or {})
    assert found is not None
    return found


def test_slurm_says_when_a_running_job_ends_and_of_one_that_is_being_ended_nothing() -> None:
    end = time.mktime(time.strptime("2026-11-23 13:31:06", "%Y-%m-%d %H:%M:%S"))
    assert ask_slurm(_RUNS).runs_until == int(end)
    assert ask_slurm(_RUNS.replace("EndTime=2026-11-23T13:31:06", "EndTime=Unknown")).runs_until is None
    assert ask_slurm(_CANCELLED).runs_until is None


@pytest.mark.parametrize(
    ("old", "new", "is_taken"),
    [
        ("", "", False),
        ("Reason=None", "Reason=TimeLimit", True),
        ("Deadline=N/A", "Deadline=N/A\n   PreemptEligibleTime=2026-11-23T13:26:06 PreemptTime=None", False),
        ("Deadline=N/A", "Deadline=N/A\n   PreemptTime=2026-11-23T13:26:08", True),
        ("JobState=COMPLETING", "JobState=NODE_FAIL", True),
        ("Restarts=0", "Restarts=1", False),
        ("Restarts=0", "Restarts=2", True),  # the next start of a job is counted while it ends
    ],
)
def test_slurm_says_whether_it_takes_the_nodes_away_itself(old: str, new: str, is_taken: bool) -> None:
    assert ask_slurm(_CANCELLED.replace(old, new), {"SLURM_RESTART_COUNT": "1"}).is_taken == is_taken


@pytest.mark.parametrize(("substate", "is_taken"), [(42, False), (63, True), (92, False)])
def test_pbs_says_that_it_runs_a_job_again(substate: int, is_taken: bool, tmp_path: Path) -> None:
    """The numbers are of OpenPBS' source: no rerun was recorded while the job ended."""
    said = say(tmp_path, "qstat", CommandAnswer(0, pbs(job_state="R", substate=substate), ""))
    found = ask_job("pbs", "41", said)
    assert found is not None
    assert found.is_taken is is_taken


@pytest.mark.parametrize(
    ("hosts", "vnodes", "found"),
    [  # recorded on OpenPBS 23.06
        ("n1/0*2+n2/0*2", "(n1:ncpus=2)+(n2:ncpus=2)", "n1=n1 n2=n2"),
        ("n4/0*0", "(n4[0]:ngpus=4:ncpus=96+n4[1]:ngpus=4:ncpus=96)", "n4=n4[0] n4=n4[1]"),
        ("n4/0+n4/1*0+n4/2*0", "(n4[0]:ncpus=1)+(n4)+(n4[1])", "n4=n4[0] n4=n4 n4=n4[1]"),
        ("", "", ""),
    ],
)
def test_pbs_has_names_of_its_own_for_the_hosts_of_a_job(hosts: str, vnodes: str, found: str, tmp_path: Path) -> None:
    said = pbs(job_state="R", exec_host=hosts, exec_vnode=vnodes) if hosts else pbs(job_state="R")
    job = ask_job("pbs", "41", say(tmp_path, "qstat", CommandAnswer(0, said, "")))
    assert job is not None
    assert " ".join("=".join(pair) for pair in job.vnodes) == found
