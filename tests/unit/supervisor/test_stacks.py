"""Ranks are asked for their stacks through the run's folder, the supervisor and the agents, and run on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from hpcddp import guard
from hpcddp.cli import stacks as verb
from hpcddp.errors import RequestError
from hpcddp.runs.folder import AttemptFolder, RunFolder
from hpcddp.runs.stacks import (
    RankStacks,
    StacksAnswer,
    format_group,
    group_ranks,
    parse_threads,
    read_answer,
    request_stacks,
    write_answer,
)
from hpcddp.supervisor.agent import Agent
from hpcddp.supervisor.follow import POLL_S, StackRequests
from hpcddp.supervisor.reports import Reports
from hpcddp.supervisor.wire import read_supervisor_address

#: Each says that it is there, in its own line.
PROGRAM = """\
import os, sys, threading, time

def wait_for_lock():
    lock = threading.Lock()
    lock.acquire()
    print("there", flush=True)
    lock.acquire()

def compute():
    print("there", flush=True)
    while True:
        pass

def read_pipe():
    reads, writes = os.pipe()
    print("there", flush=True)
    os.read(reads, 1)

globals()[sys.argv[1]]()
"""


class Job:
    """Ranks of this program with their agents, and a supervisor's ears, in this process."""

    def __init__(self, attempt: AttemptFolder, folder: Path, until: ExitStack) -> None:
        self.attempt, self._until, self._size = attempt, until, 0
        self.now = 1000.0
        self.reports = Reports(1000.0, {})
        until.callback(self.reports.close)
        self.reports.open(attempt)
        self.requests = StackRequests(attempt, self.reports, lambda: self.now)
        self._program = folder / "train.py"
        self._program.write_text(PROGRAM)

    def start(self, *functions: str) -> subprocess.Popen[str]:
        """One process for each function, all of one agent, as torchrun has them."""
        address = read_supervisor_address(self.attempt)
        assert address is not None
        agent = Agent(self.attempt, address, self._size, 8, f"node{self._size}", os.environ)
        marks = {"HPCDDP_HEARTBEAT": agent.path, "PYTHONPATH": os.pathsep.join(guard.__path__), "WORLD_SIZE": "8"}
        of_agent = {guard.RANK_MARKS: "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RUN_ID": "1"} if len(functions) > 1 else {}
        for local, function in enumerate(functions):
            env = os.environ | marks | of_agent | {"RANK": str(self._size + local), "LOCAL_RANK": str(local)}
            words = [sys.executable, str(self._program), function]
            process = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True)
            self._until.enter_context(process)
            self._until.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "there\n"
        first, self._size = self._size, self._size + len(functions)
        agent.start(process.pid)
        self.listen(lambda: first in self.reports.ranks)
        return process

    def listen(self, is_so: Callable[[], bool]) -> None:
        """Until then; the test's own timeout ends what never comes."""
        while not is_so():
            self.reports.read()
            self.requests.poll()
            time.sleep(0.01)

    def ask(self) -> list[RankStacks]:
        request, answers = request_stacks(self.attempt), list[RankStacks]()

        def is_answered() -> bool:
            self.now += POLL_S if self.reports.stacks is None else 0.0
            answers.extend(read_answer(self.attempt, request) or ())
            return bool(answers)

        self.listen(is_answered)
        return answers


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptFolder:
    attempt = RunFolder(str(tmp_path / "runs" / "train")).attempt("7.1")
    os.makedirs(attempt.path)
    return attempt


@pytest.fixture
def job(attempt: AttemptFolder, tmp_path: Path) -> Iterator[Job]:
    with ExitStack() as until:
        yield Job(attempt, tmp_path, until)


def test_each_rank_says_where_it_stands_whatever_it_does_and_runs_on(job: Job):
    stopped = job.start("wait_for_lock")
    job.start("compute", "read_pipe")  # of one agent
    for _ in range(2):
        found = {one.rank: parse_threads(one.text)[0][-1]["function"] for one in job.ask()}
        assert found == {0: "wait_for_lock", 1: "compute", 2: "read_pipe"}
    stopped.send_signal(signal.SIGSTOP)
    first = job.ask()[0]
    assert (first.rank, first.text, first.why) == (0, "", "it was stopped by a signal (SIGSTOP)")


def test_an_agent_that_cannot_answer_and_a_rank_without_python_are_said(job: Job, attempt: AttemptFolder):
    address = read_supervisor_address(attempt)
    assert address is not None
    agent = Agent(attempt, address, 0, 2, "node0", os.environ)
    agent.start(0)
    job.listen(lambda: 0 in job.reports.ranks)
    [one] = job.ask()
    assert one.why.startswith("no Python of it has begun")
    write_answer(attempt, StacksAnswer("17-4", {1: "node1"}))
    assert read_answer(attempt, "17-4") == [RankStacks(1, "node1", "", "its agent does not answer")]


DUMP = """\
Thread 0x1 (most recent call first):
  File "/env/lib/threading.py", line 3 in wait

Current thread 0x2 (most recent call first):
  File "/env/lib/torch/distributed/c10d.py", line 9 in all_reduce
  File "<frozen importlib._bootstrap>", line 1 in _find_and_load
  File "/home/a b/train.py", line 7 in main
"""


def test_ranks_with_one_stack_are_shown_once_outermost_first():
    others = [RankStacks(rank, "n1", DUMP, "") for rank in (0, 1, 3)]
    late = RankStacks(2, "n2", DUMP.replace("line 7", "line 8"), "")
    gone = RankStacks(4, "n2", "", "its process has ended")
    groups = group_ranks([gone, late, *others], threads=False)
    assert "".join(format_group(one, ["/env/lib/"]) for one in groups) == (
        "ranks 0-1, 3 on n1\n  /home/a b/train.py:7, in main\n  torch/distributed/c10d.py:9, in all_reduce\n"
        "rank 2 on n2\n  /home/a b/train.py:8, in main\n  torch/distributed/c10d.py:9, in all_reduce\n"
        "rank 4 on n2: its process has ended\n"
    )
    assert "  thread 1\n  threading.py:3, in wait\n" in format_group(
        group_ranks(others, threads=True)[0], ["/env/lib/"]
    )


def test_of_a_run_that_does_not_run_there_are_no_stacks(attempt: AttemptFolder, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(Path(attempt.run.path).parents[1])
    with pytest.raises(RequestError, match="no rank of runs/train runs"):
        verb.run(verb.build_parser().read_words(["train"]), {})
