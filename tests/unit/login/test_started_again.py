"""A job that starts again is the same job, whatever its earlier starts were: each way of starting again, each verb."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

import hpcddp
from hpcddp.cli.main import main
from hpcddp.login.judge import has_live_job
from hpcddp.runs.folder import RunFolder
from hpcddp.runs.jsonfile import write_object
from hpcddp.runs.lock import BY_HAND, release_run
from hpcddp.runs.state import record_checkpoint, write_state

from .conftest import SLURM
from .runs import held, submitted

Program = Callable[[str, str], None]
RUN = RunFolder("runs/a")
NOTE = 'echo "$(basename $0) $*" >> ../called'
BEFORE, SINCE = 1767268790, 1767268900  # seconds since 1970, before and after the holds of runs.py begin
PBS = ["--site", "generic-pbs", "--gpus-per-node", "0", "--set", "cpus_per_node=2", "--launcher", "openmpi"]
ASKED = {"slurm": SLURM, "pbs": [*PBS, "--walltime", "10m", "--ranks-per-node", "2"]}
IDS = {"slurm": ("12", "13", "14"), "pbs": ("12.pbs1", "13.pbs1", "14.pbs1")}
WORDS = {
    "slurm": {"queued": "PENDING", "running": "RUNNING", "cancelled": "CANCELLED"},
    "pbs": {"queued": "Q", "running": "R", "cancelled": "F", "follows": "H"},
}
#: of the scheduler: job -> its state, and when it has started
Shown = Mapping[str, tuple[str, int]]


def show(program: Program, scheduler: str, shown: Shown) -> None:
    """A stand-in for squeue or qstat."""
    if scheduler == "slurm":
        lines = [
            f"{job}|{job}|N/A|PENDING|N/A|N/A|Dependency|afterany:12(unfulfilled)|"
            if state == "follows"
            else f"{job}|{job}|N/A|{WORDS[scheduler][state]}|{_local(at)}|2099-01-01T00:00:00|None||"
            for job, (state, at) in shown.items()
        ]
        text = "\n".join(lines)
    else:
        jobs = {
            job: {"job_state": WORDS[scheduler][state], "substate": 91 if state == "cancelled" else 42}
            | ({"stime": time.strftime("%a %b %d %H:%M:%S %Y", time.localtime(at))} if at else {})
            | ({"depend": "afterany:12.pbs1@pbs1", "Hold_Types": "s"} if state == "follows" else {})
            for job, (state, at) in shown.items()
        }
        text = json.dumps({"Jobs": jobs})
    program("squeue" if scheduler == "slurm" else "qstat", f"cat <<'END'\n{text}\nEND")
    program("scancel" if scheduler == "slurm" else "qdel", NOTE)


def _local(at: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(at)) if at else "N/A"


def restarted(scheduler: str, job: str, _after: str, _other: str, *, by_hand: bool = False) -> None:
    """The supervisor has started the ranks again (max_restarts), or a person has typed `hpcddp launch` twice."""
    first = held(RUN, job, scheduler=scheduler, by_hand=by_hand)
    record_checkpoint(first, step=3, epoch=0)
    release_run(RUN, first.name, 1 if by_hand else None)
    held(RUN, job, attempt=f"{job}{BY_HAND}8.1" if by_hand else f"{job}.2", scheduler=scheduler)


def launched_twice(scheduler: str, job: str, after: str, other: str) -> None:
    restarted(scheduler, job, after, other, by_hand=True)


def of_a_chain(scheduler: str, job: str, after: str, other: str) -> None:
    """As `restarted`, in a chain: both starts have the follow-up."""
    restarted(scheduler, job, after, other)
    for number in (1, 2):
        attempt = RUN.attempt(f"{job}.{number}")
        Path(attempt.next).write_text(f"{after}\n")
        write_object(attempt.chain, {"attempt": attempt.name, "turn": 1, "of": 3, "step": 0})


def ended_by_a_signal(scheduler: str, job: str, _after: str, _other: str) -> None:
    """The scheduler queues the job again (qrerun, scontrol requeue): it has saved, and has said so."""
    attempt = held(RUN, job, scheduler=scheduler, status=143)
    write_state(attempt, "unfinished", step=7, epoch=1, reason="SIGTERM")


def saved_by_itself(scheduler: str, job: str, _after: str, _other: str) -> None:
    """A program without a state has saved at the signal that takes its job back, and has ended well."""
    release_run(RUN, held(RUN, job, scheduler=scheduler).name, 0, "SIGTERM")


def ended_well(scheduler: str, job: str, _after: str, _other: str) -> None:
    """Somebody has the scheduler start a job again whose program has said nothing but status 0."""
    held(RUN, job, scheduler=scheduler, status=0)


def killed(scheduler: str, job: str, _after: str, _other: str) -> None:
    """As by a lost node: nothing was said."""
    record_checkpoint(held(RUN, job, scheduler=scheduler), step=3, epoch=0)


def failed(scheduler: str, job: str, _after: str, _other: str) -> None:
    """Somebody has the scheduler start a job again that had failed."""
    write_state(held(RUN, job, scheduler=scheduler, status=1), "failed", step=0, epoch=0, reason="ValueError: no")


def another_came_between(scheduler: str, job: str, after: str, other: str) -> None:
    """While the job waits to start again, a person has gone on by hand in another one."""
    ended_by_a_signal(scheduler, job, after, other)
    held(RUN, other, scheduler=scheduler, by_hand=True, status=1)


WAYS = {
    "restarted, runs": (restarted, {0: ("running", BEFORE)}, "running"),
    "launched twice, runs": (launched_twice, {0: ("running", BEFORE)}, "running"),
    "restarted in a chain, runs": (of_a_chain, {0: ("running", BEFORE), 1: ("follows", 0)}, "running"),
    "requeued after a signal, waits": (ended_by_a_signal, {0: ("queued", 0)}, "queued"),
    "requeued after a signal, has started": (ended_by_a_signal, {0: ("running", SINCE)}, "running"),
    "requeued after a save of its own, has started": (saved_by_itself, {0: ("running", SINCE)}, "running"),
    "requeued after a good end, waits": (ended_well, {0: ("queued", 0)}, "queued"),
    "requeued after a kill, waits": (killed, {0: ("queued", 0)}, "queued"),
    "requeued after a kill, has started": (killed, {0: ("running", SINCE)}, "running"),
    "requeued after a failure, has started": (failed, {0: ("running", SINCE)}, "running"),
    "requeued, and another one was between": (
        another_came_between,
        {0: ("queued", 0), 2: ("running", BEFORE)},
        "queued",
    ),
}


@pytest.mark.parametrize("scheduler", ["slurm", "pbs"])
@pytest.mark.parametrize("way", WAYS)
def test_every_verb_says_of_a_job_that_starts_again_what_its_scheduler_says(
    here: Path, program: Program, capsys: pytest.CaptureFixture[str], scheduler: str, way: str
) -> None:
    ids = IDS[scheduler]
    begin, shown, state = WAYS[way]
    job = submitted(RUN, ids[0], scheduler=scheduler).job
    begin(scheduler, *ids)
    show(program, scheduler, {ids[at]: told for at, told in shown.items()})
    found = hpcddp.Job(run="a").status()
    assert (found.state, found.job, found.exit_status) == (state, job, None)
    assert has_live_job(RUN, os.environ)  # so `logs -f` and `status --watch` go on
    with pytest.raises(TimeoutError):
        hpcddp.Job(run="a").wait(timeout_s=0)
    program("sbatch", "echo 4711")
    program("qsub", "echo 4711.pbs1")
    assert main(["submit", *ASKED[scheduler], "--name", "a", "--", "python", "-c", "pass"]) == 2
    assert f"job {job} ({state}) has runs/a, and two jobs cannot write one run" in capsys.readouterr().err
    assert main(["cancel", "a"]) == 0
    called = Path("../called").read_text().splitlines() if Path("../called").exists() else []
    by_hand = "launched" in way
    asked = Path(RUN.stop_request(f"{job}{BY_HAND}8" if by_hand else job)).exists()
    follows = [f"{'scancel' if scheduler == 'slurm' else 'qdel'} {ids[1]}"] if 1 in shown else []
    if state == "queued":
        assert called == [f"{'scancel' if scheduler == 'slurm' else 'qdel'} {job}"]
    elif scheduler == "slurm" and not by_hand:
        assert (called, asked) == ([*follows, f"scancel --batch --signal=TERM {job}"], False)
    elif "has started" in way and "kill" not in way:  # nobody would hear a request yet
        assert called == [f"qdel {job}"]
    else:
        assert (called, asked) == (follows, True)


@pytest.mark.parametrize("scheduler", ["slurm", "pbs"])
def test_a_job_that_lives_on_after_what_was_launched_in_it_is_none_of_the_runs(
    here: Path, program: Program, capsys: pytest.CaptureFixture[str], scheduler: str
) -> None:
    job = IDS[scheduler][0]
    held(RUN, job, scheduler=scheduler, by_hand=True, status=1)
    show(program, scheduler, {job: ("running", BEFORE)})
    assert hpcddp.Job(run="a").wait(timeout_s=0).state == "failed"
    assert main(["cancel", "a"]) == 0
    assert "a: nothing waits or runs" in capsys.readouterr().err
    assert not Path("../called").exists()


@pytest.mark.parametrize("scheduler", ["slurm", "pbs"])
def test_a_job_whose_follow_up_has_begun_is_over_for_good(here: Path, program: Program, scheduler: str) -> None:
    first, after, _ = IDS[scheduler]
    ended_by_a_signal(scheduler, first, "", "")
    Path(RUN.attempt(f"{first}.1").next).write_text(f"{after}\n")
    write_state(held(RUN, after, scheduler=scheduler, status=85), "unfinished", step=9, epoch=1, reason="deadline")
    program("squeue", NOTE)
    program("qstat", NOTE)
    assert hpcddp.Job(run="a").status().why == "deadline"
    called = Path("../called").read_text()
    assert first not in called.split()
    assert scheduler == "slurm" or after in called.split()


@pytest.mark.parametrize(
    ("scheduler", "answer"),
    [
        ("slurm", "12|12|N/A|PENDING|N/A|N/A|DependencyNeverSatisfied|afterok:11(failed)|"),
        ("slurm", "12|12|N/A|PENDING|N/A|N/A|JobHeldAdmin||"),
        ("pbs", '{"Jobs": {"12": {"job_state": "H", "Hold_Types": "us", "depend": "afterok:11.pbs1@pbs1"}}}'),
    ],
)
def test_waiting_ends_with_a_job_that_only_a_person_can_release(
    here: Path, program: Program, scheduler: str, answer: str
) -> None:
    submitted(RUN, "12", scheduler=scheduler)
    program("squeue" if scheduler == "slurm" else "qstat", f"cat <<'END'\n{answer}\nEND")
    assert hpcddp.Job(run="a").wait(timeout_s=0).state == "held"


@pytest.mark.parametrize(
    ("substate", "state"), [(60, "queued"), (63, "queued"), (50, "unfinished"), (51, "unfinished")]
)
def test_a_job_that_ends_for_pbs_to_start_it_again_waits_and_one_that_ends_for_good_does_not(
    here: Path, program: Program, capsys: pytest.CaptureFixture[str], substate: int, state: str
) -> None:
    """As OpenPBS 23.06 shows a job between qrerun and its second start, and refuses to delete it then."""
    job = submitted(RUN, "8.login", scheduler="pbs").job
    ended_by_a_signal("pbs", job, "", "")
    about = {
        "job_state": "E",
        "substate": substate,
        "stime": "Thu Jan  1 11:59:50 2026",
        "comment": "Job run at Thu Jan 01 at 11:59 on (node1:ncpus=1)",
        "run_count": 1,
        "Rerunable": "True",
        "Exit_status": -11,
    }
    program("qstat", f"cat <<'END'\n{json.dumps({'Jobs': {job: about}})}\nEND")
    refusal = f"qdel: Request invalid for state of job {job}"
    program("qdel", f"echo '{refusal}' >&2; exit 168")
    found = hpcddp.Job(run="a").status()
    assert (found.state, has_live_job(RUN, os.environ)) == (state, state == "queued")
    assert (found.why == "it is started again") is (state == "queued")
    assert main(["cancel", "a"]) == (5 if state == "queued" else 0)
    assert (refusal in capsys.readouterr().err) is (state == "queued")
