"""What a rank leaves running is ended on its host, by its agent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcddp.runs.folder import AttemptFolder, RunFolder
from hpcddp.supervisor.leftover import end_left, find_left, kill_command
from hpcddp.supervisor.reports import Reports
from tests.conftest import wait_until

RANK = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "HPCDDP_LOG_RANKS": "1",
}
IGNORES = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(1000)"


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptFolder:
    attempt = RunFolder(str(tmp_path)).attempt("7.1")
    os.makedirs(os.path.dirname(attempt.log))
    return attempt


@pytest.fixture
def marks(attempt: AttemptFolder) -> Iterator[dict[str, str]]:
    marks = {"HPCDDP_RUN_DIR": attempt.run.path, "HPCDDP_ATTEMPT": attempt.name}
    yield marks
    for process in find_left(marks, os.environ):
        os.kill(process, signal.SIGKILL)


@pytest.fixture
def reports(attempt: AttemptFolder) -> Iterator[Reports]:
    reports = Reports(0.0, {})
    reports.open(attempt)
    yield reports
    reports.close()


def start_rank(marks: dict[str, str], script: str, **options: Any) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "hpcddp", "exec", "--", "sh", "-c", script]
    return subprocess.Popen(words, env=os.environ | RANK | marks, **options)


def hear_end(reports: Reports, rank: subprocess.Popen[bytes]) -> int:
    while rank.poll() is None:
        reports.read()
        time.sleep(0.01)
    return rank.returncode


def test_a_rank_leaves_nothing_running(attempt: AttemptFolder, marks: dict[str, str], reports: Reports):
    with start_rank(marks, "setsid sleep 1000 >/dev/null 2>&1 </dev/null & exit 7") as rank:
        assert hear_end(reports, rank) == 7
    assert reports.ranks[1].status == 7 << 8  # it was told before
    assert find_left(marks, os.environ) == []
    log = "".join(path.read_text() for path in Path(attempt.log).parent.iterdir())
    assert "hpcddp: rank 1 left 1 of its processes on this host; they are killed" in log


def test_what_a_rank_has_started_ends_where_its_agent_is_killed(
    attempt: AttemptFolder, marks: dict[str, str], reports: Reports
):
    left = Path(attempt.path, "left")
    starts = f"setsid sleep 1000 >/dev/null 2>&1 </dev/null & echo $! >{left}; exec sleep 1000"
    with start_rank(marks, starts, start_new_session=True, stdout=subprocess.PIPE) as rank:
        assert wait_until(lambda: 1 in reports.ranks or bool(reports.read()))
        assert wait_until(lambda: left.exists() and left.read_text().endswith("\n"))
        os.killpg(rank.pid, signal.SIGKILL)
        assert rank.stdout is not None
        assert rank.stdout.read() == b""  # a launcher waits for its end: nobody holds it
    assert wait_until(lambda: find_left(marks, os.environ) == [])


def test_what_does_not_end_by_itself_is_killed(marks: dict[str, str]):
    told = list[str]()
    with subprocess.Popen([sys.executable, "-c", IGNORES], env=os.environ | marks, stdout=subprocess.PIPE) as left:
        assert left.stdout is not None
        left.stdout.readline()
        end_left(marks, os.environ, told.append, "rank 3")
        assert left.wait() == -signal.SIGKILL
    assert told[0] == "rank 3 left 1 of its processes on this host; they are killed"


def test_of_what_ends_by_itself_nothing_is_said(marks: dict[str, str]):
    told = list[str]()
    with subprocess.Popen(["sleep", "0.2"], env=os.environ | marks) as ssh:
        end_left(marks, os.environ, told.append, rest_s=600.0)
        assert ssh.wait() == 0
    assert told == []


@pytest.mark.parametrize("own", [{"SLURM_JOB_ID": "7"}, {}], ids=["in a job", "where ssh left its number out"])
def test_a_job_that_a_rank_has_submitted_is_left_alone(marks: dict[str, str], own: dict[str, str]):
    with (
        subprocess.Popen(["sleep", "1000"], env=os.environ | marks | own) as left,
        subprocess.Popen(["sleep", "1000"], env=os.environ | marks | own | {"SLURM_JOB_ID": "8"}) as other,
    ):
        for process in (left, other):  # in the middle of an exec it is empty
            assert wait_until(lambda process=process: Path(f"/proc/{process.pid}/environ").read_bytes() != b"")
        assert find_left(marks, own) == [left.pid]
        subprocess.run(kill_command(marks, own), check=True)
        assert left.wait() == -signal.SIGKILL
        assert other.poll() is None
        other.kill()
