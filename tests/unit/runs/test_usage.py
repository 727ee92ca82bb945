"""What a run has used, over attempts of which one was killed, and what to ask for next time."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hpcddp.cli.main import main
from hpcddp.runs.folder import AttemptFolder, RunFolder, list_numbered
from hpcddp.runs.state import RunState, replace_state
from hpcddp.runs.submitted import JobEnd, Submission, begin_submission, record_job_end, record_submission
from hpcddp.runs.usage import format_efficiency, read_efficiency
from tests.unit.login.runs import SINCE, held

BEGAN = 1767268800.0  # SINCE
H100 = ["NVIDIA H100 80GB HBM3", 80.0, 40000.0, 81559.0]


def line(host: str, elapsed_s: float, **more: Any) -> dict[str, Any]:
    used = {"cpus": 32, "cpu_s": 4 * elapsed_s, "memory": 10_000_000_000, "limit": 64_000_000_000, "by": "cgroup"}
    return {"host": host, "elapsed_s": elapsed_s, **used, "gpus": [], "phases": [], "looks": 1, "time": 0.0} | more


def use(attempt: AttemptFolder, host: str, *lines: dict[str, Any], rest: str = "") -> None:
    Path(attempt.usage(host)).write_text("".join(f"{json.dumps(one)}\n" for one in lines) + rest)


def train(
    attempt: AttemptFolder, steps: range, begins_s: float, step_s: float = 1.0, flops: float | None = None
) -> None:
    """Its steps, each of 64 samples, the first one so many seconds after the run has begun."""
    told: list[dict[str, Any]] = [{"kind": "start", "schema": 1, "time": 0.0}]
    told += [] if flops is None else [{"kind": "model", "flops_per_sample": flops, "time": 0.0}]
    for nth, step in enumerate(steps):
        told.append({"kind": "step", "step": step, "loss": 1.0, "time": BEGAN + begins_s + nth * step_s})
    Path(attempt.metrics).write_text("".join(f"{json.dumps(one)}\n" for one in told))
    Path(attempt.versions).write_text(json.dumps({"schema": 1, "plan": {"global_batch": 64}}))


def end(run: RunFolder, nth: int, after_s: float) -> None:
    """The attempt has ended so many seconds after the run has begun."""
    os.utime(os.path.join(list_numbered(run.holders)[nth], "ended"), (BEGAN + after_s, BEGAN + after_s))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """On two nodes: 1000 s to step 900, of which 101 … are made again by the next attempt, which takes 2000 s."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TZ", "UTC")
    run = RunFolder("runs/train")
    Path(run.path).mkdir(parents=True)
    Path(run.plan).write_text(json.dumps({"schema": 1, "nodes": 2, "ranks_per_node": 4}))
    first = held(run, "7", status=1)
    train(first, range(1, 901), 100.0)
    end(run, 0, 1000.0)
    second = held(run, "8", status=0)
    train(second, range(101, 1001), 100.0)
    end(run, 1, 2000.0)
    for attempt in (first, second):
        phases = [50.0, 90.0, 600.0, 200.0, 10.0]
        for host in ("n1", "n2"):
            early = line(host, 500.0, gpus=[H100, H100], phases=phases)
            late = line(host, 900.0, gpus=[[*H100[:1], 40.0, *H100[2:]], H100], phases=phases, memory=12_000_000_000)
            use(attempt, host, early, late, rest='{"host": "n1", "ela')  # the node was lost in the middle of a line
    return run


def test_a_run_that_was_restarted_has_what_it_paid_lost_and_used(run: RunFolder):
    folder = begin_submission(run, "#!/bin/bash\n")
    record_submission(folder, Submission("slurm", "7", SINCE, "login", "/", walltime_s=86400))
    assert format_efficiency(read_efficiency(run)) == (
        "runs/train: 2 attempts\n"
        "  paid       1.67 node-hours, 0.45 of them lost (done again, or to be done again)\n"
        "  time       27 % lost, 37 % start-up, 4 % input, 24 % compute, 8 % communication\n"
        "  GPUs       70 % of the time in use, memory at most 42 of 86 GB\n"
        "  CPUs       12 % of 32 CPUs on each node\n"
        "  memory     at most 12.0 of 64 GB on a node\n"
        "  speed      64 samples/s\n"
        "  next time  --set cpus_per_rank=2 --set mem_gb=15 --walltime 00:40:00\n"
    )


@pytest.mark.parametrize(("status", "lost_s"), [(1, 400.0), (None, 0.0)])
def test_steps_behind_the_last_checkpoint_are_lost_once_the_attempt_has_ended(
    status: int | None, lost_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    run = RunFolder("runs/train")
    attempt = held(run, "7", status=status)
    train(attempt, range(1, 901), 100.0)
    if status is not None:
        end(run, 0, 1000.0)
    replace_state(run, RunState("unfinished", 501, 0, "a rank was killed", "7.1"))
    assert read_efficiency(run).attempts[0].lost_s == lost_s


@pytest.mark.parametrize("status", [1, None])
def test_of_a_run_that_has_not_come_to_its_end_nothing_is_said_of_the_next_one(run: RunFolder, status: int | None):
    begin_submission(run, "#!/bin/bash\n")
    third = held(run, "9", status=status)
    use(third, "n1", line("n1", 10.0))
    assert "next time" not in format_efficiency(read_efficiency(run))


def test_mfu_is_what_the_model_says_of_the_peak_of_its_gpus(run: RunFolder):
    train(run.attempt("8.1"), range(101, 1001), 100.0, flops=1.0e13)
    found = read_efficiency(run)
    assert found.mfu == pytest.approx(64 * 1.0e13 / (4 * 989e12))
    assert "64 samples/s, MFU 16 %" in format_efficiency(found)


def test_mfu_is_of_the_gpus_on_which_the_steps_were_made(run: RunFolder):
    train(run.attempt("8.1"), range(101, 1001), 100.0, flops=1.0e13)
    on_one_gpu = held(run, "9", status=1)  # and it made no step
    use(on_one_gpu, "n1", line("n1", 60.0, gpus=[H100]))
    assert read_efficiency(run).mfu == pytest.approx(64 * 1.0e13 / (4 * 989e12))


def test_of_a_plain_script_that_was_killed_the_use_is_known_and_nothing_is_invented(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    run = RunFolder("runs/plain")
    attempt = held(run, "7")
    use(attempt, "n1", line("n1", 100.0, cpu_s=3100.0, by="processes"))
    os.utime(attempt.usage("n1"), (BEGAN + 100.0, BEGAN + 100.0))
    assert main(["efficiency", "plain"]) == 0
    assert capsys.readouterr().out == (
        "runs/plain: 1 attempt\n"
        "  paid       0.03 node-hours\n"
        "  CPUs       97 % of 32 CPUs on each node\n"
        "  memory     at most 10.0 of 64 GB on a node\n"
    )
    assert main(["efficiency", "plain", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["mfu"], found["samples_per_s"], found["phases"]) == (None, None, {})
    assert found["attempts"][0]["used"][0]["cpu_s"] == 3100.0


def test_a_run_without_any_line_has_its_hours_and_one_that_has_not_begun_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    run = RunFolder("runs/early")
    record_submission(begin_submission(run, ""), Submission("slurm", "9", SINCE, "login", "/"))
    assert main(["efficiency", "early"]) == 2
    assert "no job of runs/early has begun" in capsys.readouterr().err
    held(run, "9", status=0)
    end(run, 0, 3600.0)
    assert main(["efficiency", "early"]) == 0
    assert capsys.readouterr().out == "runs/early: 1 attempt\n  paid       1.00 node-hours\n"


def test_a_job_is_paid_for_all_its_nodes_spare_ones_too(run: RunFolder) -> None:
    record_job_end(run.attempt("8.1"), JobEnd("slurm", "8", 3))
    assert [one.nodes for one in read_efficiency(run).attempts] == [2, 3]
