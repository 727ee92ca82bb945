"""A hang of a plain DDP script, which knows nothing of hpcddp, is named by the rank that the others wait for."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcddp.runs.folder import RunFolder
from hpcddp.runs.usage import read_efficiency

pytestmark = pytest.mark.multirank

Launch = Callable[..., subprocess.CompletedProcess[str]]
#: The missing rank, and where the other one waits for it.
CAUSE = (
    r"no rank gets on; rank 1 on \S+ stands at"
    r" plain_hang\.py:\d+, in other_work: threading\.Event\(\)\.wait\(\) \(in wait\);"
    r" others wait for it at plain_hang\.py:\d+, in main: dist\.all_reduce\(torch\.ones\(1\)\) \(in all_reduce\)"
)

LIMITS = {"HPCDDP_WATCHDOG": "1", "HPCDDP_WATCHDOG_END": "3"}


@pytest.fixture
def launch(run: Callable[..., Any], programs: Path, tmp_path: Path) -> Launch:
    def start(flavour: Any, kind: str, timeout_s: int, *options: str, **limits: str) -> Any:
        env = flavour.env | {"OMP_NUM_THREADS": "1"} | limits
        asked = ["--here", "--ranks-per-node", "2", "--launcher", flavour.launcher, "--walltime", "10m", *options]
        program = [sys.executable, str(programs / "plain_hang.py"), kind, str(timeout_s)]
        return run(["hpcddp", "launch", *asked, "--name", "t", "--", *program], env=env, cwd=tmp_path)

    return start


@pytest.mark.parametrize(
    ("flavour", "launcher", "restarts"),
    [
        ("openmpi5", "", 0),
        pytest.param("mpich", "", 0, marks=pytest.mark.slow),
        pytest.param("openmpi5", "torchrun", 0, marks=pytest.mark.slow),
        pytest.param("openmpi5", "", 1, marks=pytest.mark.slow),
    ],
    indirect=["flavour"],
)
def test_a_plain_script_that_hangs_is_ended_or_restarted_with_the_missing_rank_as_its_cause(
    launch: Launch, flavour: Any, launcher: str, restarts: int
):
    flavour = flavour._replace(launcher=launcher or flavour.launcher)
    options = ["--set", f"max_restarts={restarts}"] if restarts else []
    done = launch(flavour, "waits", 600, *options, **LIMITS)
    assert done.returncode not in {0, 2}, done.stderr
    assert "no progress for 1 s. The ranks stand at:\n" in done.stderr
    says = r"have waited for each other for 3 s, at different lines: rank 1(, after 1 collective,)? at plain_hang"
    assert re.search(says, done.stderr), done.stderr
    assert len(re.findall(f"hpcddp: {CAUSE}: the other ranks are ended", done.stderr)) == 1 + restarts, done.stderr
    assert done.stderr.count("hpcddp: start 2 of at most 2") == restarts, done.stderr


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("loops", r"rank 1 on \S+ (is|stands) at plain_hang\.py:\d+, in other_work: .*; others wait for it at"),
        ("before", r"rank 1 on \S+ stands at plain_hang\.py:\d+, in main: threading\.Event\(\)\.wait\(\)"),
        pytest.param("thread", r"rank 1 on \S+ stands at threading\.py:\d+, in _shutdown", marks=pytest.mark.slow),
        pytest.param("ring", r"rank 0 on \S+ waits at plain_hang\.py:\d+, in main: dist", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_does_not_wait_itself_is_named_and_the_job_ends(
    launch: Launch, openmpi5: Any, kind: str, says: str
):
    done = launch(openmpi5, kind, 600, **LIMITS)
    assert done.returncode not in {0, 2}, done.stderr
    assert re.search(f"hpcddp: no rank gets on; {says}.*: the other ranks are ended", done.stderr), done.stderr


def test_where_torch_ends_the_one_that_waits_the_other_is_the_cause(launch: Launch, openmpi5: Any):
    done = launch(openmpi5, "waits", 10, HPCDDP_WATCHDOG_END="off")
    assert done.returncode == 1, done.stderr
    assert re.search(f"hpcddp: {CAUSE}", done.stderr), done.stderr


def test_a_rank_that_computes_and_prints_is_not_ended_and_its_use_is_recorded(
    launch: Launch, openmpi5: Any, tmp_path: Path
):
    done = launch(openmpi5, "computes", 600, **LIMITS)
    assert done.returncode == 0, done.stderr
    used = read_efficiency(RunFolder(str(tmp_path / "runs/t")))
    assert used.cpu_use
    assert used.memory
    assert list(used.phases) == ["start-up"]
