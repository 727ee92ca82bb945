"""The start and the end of a job's attempt: its run, its name, its records, what a chain decides, and the status."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpcddp.errors import HpcddpError, LaunchError
from hpcddp.runs.chain import record_opened
from hpcddp.runs.folder import AttemptFolder, RunFolder
from hpcddp.runs.lock import is_held_by, release_run
from hpcddp.runs.state import read_state, record_checkpoint, write_state
from hpcddp.supervisor.events import ERROR, GONE, KILLED, SILENT, UNHEARD, UNKNOWN, Event
from hpcddp.supervisor.follow import find_job_of_script
from hpcddp.supervisor.order import LaunchLine, Order
from hpcddp.supervisor.program import AttemptEnd
from hpcddp.supervisor.recovery import Recovery
from hpcddp.supervisor.start_end import StartedAttempt, begin, end_attempt
from hpcddp.supervisor.supervise import Attempts, JobEnds
from tests.unit.chain_run import write_chain_run

COMMAND = ("python", "train.py")


class Node:
    """Begins and ends attempts here, and keeps what people are told."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.told: list[str] = []

    def begin(self, job: str, *, command: tuple[str, ...] = COMMAND, **asked) -> StartedAttempt | int:
        self.told.clear()
        env = {"PBS_JOBID": job}
        order = Order("pbs", "openmpi", LaunchLine((), command, 1), **asked)
        own = find_job_of_script("pbs", env)
        return begin(order, str(self.base), own, env, "", self.told.append)

    def attempt(self, job: str, **asked) -> str:
        started = self.begin(job, **asked)
        assert isinstance(started, StartedAttempt)
        return started.attempt.path


@pytest.fixture
def node(tmp_path, monkeypatch) -> Node:
    monkeypatch.chdir(tmp_path)
    return Node(tmp_path / "runs/train")


def test_each_start_of_a_job_has_a_folder_of_its_own(node: Node):
    for number in (1, 2):  # it ended without a word, and its scheduler started it again
        assert node.attempt("41.pbs1") == f"{node.base}/attempts/41.pbs1.{number}"
    release_run(RunFolder(str(node.base)), "41.pbs1.2")
    assert node.attempt("42.pbs1") == f"{node.base}/attempts/42.pbs1.1"
    assert json.loads((node.base / "plan.json").read_text())["command"] == [*COMMAND]


def test_a_job_that_was_begun_with_fresh_sets_its_own_progress_aside_never(node: Node):
    node.attempt("40")
    release_run(RunFolder(str(node.base)), "40.1", 85)
    stamp = {"fresh": "20261126T0255-1a2b", "chain": 9}
    first = node.begin("41", **stamp).attempt
    assert node.told[0] == "run runs/train: new, as --fresh asks; the old one is runs/train.old1"
    record_checkpoint(first, step=5, epoch=0)
    (node.base / "checkpoints/step-00000005").mkdir(parents=True)
    _follow(first, "42")
    for job, name in (("41", "41.2"), ("42", "42.1")):  # a requeue, and the next of the chain
        assert node.attempt(job, **stamp) == f"{node.base}/attempts/{name}"
        assert node.told[0] == "run runs/train: resumes from step 5"


def test_a_job_that_is_started_again_waits_for_the_end_of_its_earlier_start(node: Node, monkeypatch, request):
    earlier = subprocess.Popen(["sleep", "infinity"])
    request.addfinalizer(earlier.kill)
    with monkeypatch.context() as as_another_process:
        as_another_process.setattr(os, "getpid", lambda: earlier.pid)
        node.attempt("41")
    monkeypatch.setattr(time, "sleep", lambda _s: (earlier.kill(), earlier.wait()))
    with pytest.raises(LaunchError, match="is in use by job 41 on"):
        node.begin("42")
    assert earlier.poll() is None
    assert node.attempt("41") == f"{node.base}/attempts/41.2"
    assert node.told[0] == "the job was started again, and its earlier start still ends: it waits"


def test_an_attempt_that_was_killed_is_unfinished_at_its_newest_checkpoint(node: Node):
    attempt = node.begin("41").attempt
    record_checkpoint(attempt, step=30, epoch=3)
    (node.base / "checkpoints/step-00000032").mkdir(parents=True)
    (node.base / "checkpoints/step-00000032/manifest.json").write_text('{"epoch": 4}')
    node.told.clear()
    assert end_attempt(attempt, AttemptEnd(0), None, node.told.append) == 85
    assert node.told == ["unfinished: step 32 (checkpoint at step 32; the attempt has ended since)"]
    assert end_attempt(attempt, AttemptEnd(137), None, node.told.append) == 137


def test_the_signal_that_came_to_the_script_is_the_reason(node: Node):
    attempt = node.begin("41").attempt
    write_state(attempt, "unfinished", step=30, epoch=3, reason="SIGUSR1")
    node.told.clear()
    assert end_attempt(attempt, AttemptEnd(0, "SIGTERM"), None, node.told.append) == 85
    assert node.told == ["unfinished: step 30 (SIGTERM)"]
    assert read_state(attempt.run).reason == "SIGTERM"
    write_state(attempt, "unfinished", step=40, epoch=3, reason="deadline")  # of a loop that writes no metrics
    node.told.clear()
    assert end_attempt(attempt, AttemptEnd(0, "SIGTERM"), None, node.told.append) == 85
    assert node.told == ["unfinished: step 40 (deadline)"]


def test_ranks_that_were_lost_are_no_failure_where_a_signal_comes_too(node: Node):
    attempt = node.begin("41").attempt
    (node.base / "checkpoints/step-00000009").mkdir(parents=True)
    write_state(attempt, "failed", step=10, epoch=0, reason="rank 0: RuntimeError: Connection closed by peer")
    killed = Event(KILLED, 1, "n1", step=10, status=9)
    node.told.clear()
    assert end_attempt(attempt, AttemptEnd(137, "SIGTERM", killed), None, node.told.append) == 137
    assert "unfinished: step 9 (rank 1 on n1 was killed by SIGKILL (often: out of memory))" in node.told
    state = read_state(attempt.run)
    assert (state.status, state.step) == ("unfinished", 9)


def test_an_error_of_the_program_is_a_failure_where_a_signal_comes_too(node: Node):
    attempt = node.begin("41").attempt
    write_state(attempt, "failed", step=10, epoch=0, reason="rank 0: ValueError: a")
    error = Event(ERROR, 0, "n0", step=10, status=1 << 8, text="ValueError: a")
    assert end_attempt(attempt, AttemptEnd(1, "SIGTERM", error), None, node.told.append) == 1
    assert read_state(attempt.run).status == "failed"


def own_run(node: Node, attempt: AttemptFolder, name: str, status: str) -> AttemptFolder:
    """As the script of the attempt opens it, and leaves it at step 30."""
    own = RunFolder(f"{node.base}-{name}").attempt(attempt.name)
    record_opened(attempt, own.run)
    write_state(own, status, step=30, epoch=3, reason="SIGUSR1")
    return own


def test_a_job_is_unfinished_as_long_as_a_run_of_its_script_is(node: Node):
    attempt = node.begin("41").attempt
    own = own_run(node, attempt, "fold", "unfinished")
    node.told.clear()
    assert end_attempt(attempt, AttemptEnd(0, "SIGTERM"), None, node.told.append) == 85
    assert node.told == ["unfinished: run runs/train-fold, step 30 (SIGTERM)"]
    again = node.begin("41").attempt  # its scheduler has started it again, and it does not come to the run
    assert end_attempt(again, AttemptEnd(0), None, node.told.append) == 85
    other = own_run(node, again, "other", "failed")
    assert end_attempt(again, AttemptEnd(1), None, node.told.append) == 1
    write_state(other, "finished", step=30, epoch=3, reason="done")
    write_state(again, "finished", step=9, epoch=1, reason="done")
    assert end_attempt(again, AttemptEnd(0), None, node.told.append) == 85
    write_state(own.run.attempt(again.name), "finished", step=30, epoch=3, reason="done")
    node.told.clear()
    assert end_attempt(again, AttemptEnd(0), None, node.told.append) == 0
    assert node.told == []


KILL = Event(KILLED, 1, "n0", status=9)


ENDS = {
    "walltime": AttemptEnd(143, "SIGTERM"),
    "loss": AttemptEnd(137, cause=KILL),
    "host": AttemptEnd(143, cause=Event(SILENT, 1, "n0")),
    "all processes of a host": AttemptEnd(143, cause=Event(GONE, 1, "n0")),
    "supervisor unheard": AttemptEnd(143, cause=Event(UNHEARD, 1, "n0", text="46")),
    "launcher": AttemptEnd(137, cause=Event(UNKNOWN, -1, "", status=137, text="the launcher ended with status 137")),
}


@pytest.mark.parametrize("ended", ENDS.values(), ids=list(ENDS))
@pytest.mark.parametrize("is_own", [True, False], ids=["own run", "job's run"])
def test_a_program_that_was_ended_behind_a_training_is_unfinished(node: Node, ended: AttemptEnd, *, is_own: bool):
    attempt = node.begin("41").attempt
    if is_own:
        own_run(node, attempt, "fold", "finished")
    else:
        write_state(attempt, "finished", step=9, epoch=1, reason="done")
    node.told.clear()
    assert end_attempt(attempt, ended, None, node.told.append) == ended.status
    assert node.told == ["unfinished: no step of a run is left, but the program was ended before it came to its end"]
    node.told.clear()
    crash = Event(KILLED, 1, "n0", status=11)
    for well in (AttemptEnd(0), AttemptEnd(139, cause=crash), AttemptEnd(1)):
        assert end_attempt(attempt, well, None, node.told.append) == well.status
    assert node.told == []


LOSS, CRASH = ENDS["loss"], AttemptEnd(139, cause=Event(KILLED, 1, "n0", status=11))
BY_SIGNAL = LOSS._replace(signal="SIGTERM")


@pytest.mark.parametrize(
    ("ended", "state", "obstacle", "late", "why"),
    [
        (AttemptEnd(0), "finished", "", [], ""),
        (AttemptEnd(1), "unfinished", "", [], ""),  # no rank has failed
        (CRASH, "finished", "", [], f"their run had finished ({CRASH.cause})"),
        (LOSS, "finished", "", [], None),  # what is behind the training was lost
        (LOSS, "unfinished", "", [], None),
        (BY_SIGNAL, "unfinished", "", [], f"SIGTERM came, and they may have ended by it ({KILL})"),
        (LOSS, "unfinished", "the job ends soon", [], "the job ends soon"),
        (LOSS, "unfinished", "", [signal.SIGTERM], ""),
        (LOSS, "unfinished", "the job ends soon", [signal.SIGTERM], ""),
    ],
)
def test_an_attempt_is_followed_by_another_or_by_the_end_of_the_job_and_its_reason(
    node: Node, monkeypatch, ended: AttemptEnd, state: str, obstacle: str, late: list[int], why: str | None
):
    monkeypatch.setattr(Recovery, "prepare_restart", lambda *_: obstacle)
    attempt = node.begin("41", max_restarts=1).attempt
    write_state(attempt, state, step=9, epoch=1, reason="")
    order, env = Order("pbs", "openmpi", LaunchLine((), COMMAND, 1), max_restarts=1), {"PBS_JOBID": "41"}
    job, signals = find_job_of_script("pbs", env), SimpleNamespace(read=lambda: late)
    attempts = Attempts(order, env, job, attempt, "", signals, None, node.told.append, by_hand=False)
    following = attempts._find_next(ended)
    attempts._reports.close()
    if why is None:
        assert following.name == "41.2"
    else:
        assert following == JobEnds(BY_SIGNAL if late else ended, why)


def test_a_chain_goes_on_behind_finished_runs_unless_their_job_has_ended_well(node: Node):
    first = node.begin("41", chain=9).attempt
    own_run(node, first, "fold1", "finished")
    _follow(first, "42")
    second = node.begin("42", chain=9).attempt
    assert node.told[-1] == "attempt 2 of at most 9, from step 30 of the runs of its script together"
    write_state(second, "finished", step=40, epoch=1, reason="done")
    _follow(second, "43")
    third = node.begin("43", chain=9).attempt
    assert node.told[-1] == "attempt 3 of at most 9, from step 70 of the runs of its script together"
    write_state(third, "finished", step=40, epoch=1, reason="done")
    _follow(third, "44")
    assert node.begin("44", chain=9) == 1  # twice, and no step between: it would be so for ever
    why = f"no step is left, and attempt {third.name} did not end well after that"
    assert node.told[-1] == f"the chain ends here: {why}"
    assert read_state(third.run).status == "finished"


@pytest.mark.parametrize("status", ["finished", "unfinished"])
def test_what_all_starts_of_a_job_have_done_counts_for_its_chain(node: Node, status: str):
    first = node.begin("41", chain=9).attempt
    write_state(first, status, step=9, epoch=1, reason="done")
    _follow(first, "42")
    again = node.begin("41", chain=9).attempt
    assert again.name == "41.2"
    _follow(again, "42")
    release_run(again.run, again.name, 137)
    third = node.begin("42", chain=9).attempt
    _follow(third, "43")
    release_run(third.run, third.name, 137)
    assert node.begin("43", chain=9) == 1  # a whole job without a step


def _follow(attempt: AttemptFolder, job: str) -> None:
    """This attempt's job has queued that one; if it wrote no end, it was killed then."""
    Path(attempt.next).write_text(f"{job}\n")


@pytest.fixture
def chain(node: Node) -> RunFolder:
    """A run of two attempts, of which the second one queued job 43."""
    return write_chain_run(node.base)


@pytest.mark.parametrize("length", [60, 0])
def test_a_chain_stops_at_a_damaged_state_and_goes_on_once_it_is_restored(chain: RunFolder, length: int, node: Node):
    path = Path(chain.state)
    whole = path.read_text()
    path.write_text(whole[:length])
    with pytest.raises(HpcddpError, match=f"{path} cannot be read: "):
        node.begin("43.pbs1", chain=5)
    assert path.read_text() == whole[:length]
    assert not os.path.exists(chain.attempt("43.pbs1.1").path)
    assert not is_held_by(chain, "43.pbs1.1")
    path.write_text(whole)
    started = node.begin("43.pbs1", chain=5)
    assert "attempt 3 of at most 5, from step 4" in node.told
    assert started.left == 2


def test_a_link_that_its_scheduler_starts_again_goes_on_as_the_same_link(chain: RunFolder, node: Node):
    for number in (1, 2):  # no progress between them: that a node failed is not the run's fault
        assert node.begin("43.pbs1", chain=5).attempt.name == f"43.pbs1.{number}"
        assert "attempt 3 of at most 5, from step 4" in node.told
    write_state(chain.attempt("43.pbs1.2"), "unfinished", step=9, epoch=0, reason="deadline")
    for number in (1, 2):
        Path(chain.attempt(f"43.pbs1.{number}").next).write_text("44.pbs1\n")
    assert node.begin("44.pbs1", chain=5).attempt.name == "44.pbs1.1"
    assert "attempt 4 of at most 5, from step 9" in node.told
    write_state(chain.attempt("44.pbs1.1"), "finished", step=10, epoch=0, reason="done")
    release_run(chain, "44.pbs1.1", 0)
    assert node.begin("44.pbs1", chain=5) == 0
    assert node.told[-1] == "the chain ends here: attempt 44.pbs1.1 has finished the run at step 10"


def test_a_chain_that_ends_holds_its_run_no_longer(node: Node):
    first = node.begin("41", chain=3)
    assert first.left == 2
    write_state(first.attempt, "finished", step=9, epoch=1, reason="done")
    Path(first.attempt.next).write_text("42")
    release_run(first.attempt.run, first.attempt.name, 0)  # its follow-up could not be cancelled
    assert node.begin("42", chain=3) == 0
    assert "the chain ends here" in node.told[-1]
    assert node.attempt("43") == f"{node.base}/attempts/43.1"


def test_a_script_outside_of_a_job_says_how_to_submit_it():
    with pytest.raises(LaunchError, match="PBS_JOBID is not set: this is a job script for PBS") as error:
        find_job_of_script("pbs", {})
    assert error.value.hint == "qsub SCRIPT, or hpcddp launch -- COMMAND"
