"""Ranks that are lost in the middle, on this machine with a real mpirun: what the state says, and how the job goes on.

Over several hosts, with every launcher and on a real Slurm: tests/cluster/test_survival.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.multirank

AT = 10  # the step at which a fault strikes; the newest checkpoint then is step 9's


class Job:
    """Runs `hpcddp launch` of 2 ranks here, and reads what it leaves."""

    def __init__(self, run: Callable[..., Any], env: dict[str, str], folder: Path, program: Path) -> None:
        self._run, self._env, self._folder, self._program = run, env, folder, program
        self.status, self.said = 0, ""

    def train(self, kind: str, struck: int, *asked: str, ranks: int = 2, walltime: str = "10m") -> dict[str, Any]:
        """The run's state at the end."""
        options = [word for setting in asked for word in ("--set", setting)]
        launch = ["hpcddp", "launch", "--here", "--ranks-per-node", str(ranks), "--launcher", "openmpi"]
        launch += ["--walltime", walltime]
        train = [sys.executable, str(self._program), "16", kind, str(struck), str(AT), "0.02"]
        done = self._run([*launch, *options, "--name", "t", "--", *train], env=self._env, cwd=self._folder)
        self.status, self.said = done.returncode, done.stderr
        return json.loads((self._folder / "runs/t/state.json").read_text())


@pytest.fixture
def job(run: Callable[..., Any], openmpi5: Any, programs: Path, tmp_path: Path) -> Job:
    return Job(run, openmpi5.env | {"OMP_NUM_THREADS": "1"}, tmp_path, programs / "struck.py")


@pytest.mark.parametrize(
    ("kind", "struck"),
    [("kill", 0), pytest.param("kill", 1, marks=pytest.mark.slow), pytest.param("freeze", 1, marks=pytest.mark.slow)],
)
def test_ranks_are_started_again_from_the_newest_checkpoint_and_a_notice_says_so(
    job: Job, kind: str, struck: int, tmp_path: Path
):
    """Of one rank in short: two cost twice as many starts of torch."""
    notify = json.dumps({"on": ["restart", "end"], "command": ["tee", "-a", str(tmp_path / "notices")]})
    more = ["stall_limit=10s"] if kind == "freeze" else []
    state = job.train(kind, struck, "max_restarts=1", f"notify={notify}", *more, ranks=struck + 1)
    assert job.status == 0, job.said
    assert (state["status"], state["step"]) == ("finished", 16)
    assert "start 2 of at most 2, from step 9" in job.said
    sent = (tmp_path / "notices").read_text()
    assert sent.index("t is started again, job ") < sent.index("t has ended, job ")
    assert f"rank {struck} on " in sent
    first, second = sorted((tmp_path / "runs/t/attempts").iterdir())
    assert state["attempt"] == second.name
    assert steps_of(first)[:9] == list(range(1, 10))
    assert steps_of(second) == list(range(10, 17))


# The program that asks whether this host is well before another start is a child of the supervisor.
SIGNAL = "[ ! -e runs/t/checkpoints ] || kill -TERM $PPID; exit 0"


def test_a_signal_during_the_recovery_leaves_the_run_unfinished(job: Job):
    state = job.train("kill", 0, "max_restarts=1", f"preflight={SIGNAL}", ranks=1)
    assert job.status == 137, job.said
    assert "the nodes are checked before the ranks are started" in job.said
    assert "SIGTERM came after the ranks had ended: they are not started again" in job.said
    assert (state["status"], state["step"]) == ("unfinished", 9)
    assert "was killed by SIGKILL" in state["reason"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "walltime", "why", "starts", "status"),
    [
        ("bug", "10m", "an earlier start ended the same way", 1, "failed"),
        ("kill", "1m", "the job ends soon", 0, "unfinished"),
    ],
)
def test_ranks_are_not_started_again_where_that_cannot_help(
    job: Job, kind: str, walltime: str, why: str, starts: int, status: str
):
    state = job.train(kind, 0, "max_restarts=5", ranks=1, walltime=walltime)
    assert f"the ranks are not started again: {why}" in job.said
    assert (job.said.count("hpcddp: start "), state["status"]) == (starts, status), job.said


def steps_of(attempt: Path) -> list[int]:
    lines = [json.loads(line) for line in (attempt / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if "loss" in line]


def test_what_exec_refuses_is_the_first_cause(run: Callable[..., Any], openmpi5: Any, tmp_path: Path):
    launch = ["hpcddp", "launch", "--here", "--ranks-per-node", "2", "--launcher", "openmpi", "--name", "t"]
    done = run([*launch, "--set", "max_restarts=5", "--", "no-such-program"], env=openmpi5.env, cwd=tmp_path)
    assert "the first cause: rank " in done.stderr
    assert ": cannot run 'no-such-program': No such file or directory" in done.stderr
    assert "the ranks are not started again: that is no node's fault" in done.stderr


FAILS = """
if [ "$RANK" = 1 ]; then
    echo "ValueError: as before" >&2
    [ -e mark ] || { touch mark; kill -9 $$; }
    exit 7
fi
sleep 600
"""


def test_programs_that_know_nothing_of_hpcddp_are_started_again_until_their_own_error_comes_again(
    run: Callable[..., Any], openmpi5: Any, tmp_path: Path
):
    launch = ["hpcddp", "launch", "--here", "--ranks-per-node", "2", "--launcher", "openmpi", "--name", "t"]
    done = run([*launch, "--set", "max_restarts=5", "--", "sh", "-c", FAILS], env=openmpi5.env, cwd=tmp_path)
    assert done.returncode == 7, done.stderr
    causes = [line for line in done.stderr.splitlines() if "the first cause: rank 1 on " in line]
    assert len(causes) == 3, done.stderr
    assert "was killed by SIGKILL" in causes[0]
    assert all(cause.endswith(": ValueError: as before") for cause in causes[1:])
    assert "not started again: an earlier start ended the same way" in done.stderr
    assert done.stderr.count("hpcddp: rank 1 on ") == 3
