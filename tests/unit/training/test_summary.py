"""What rank 0 prints at the start and at the end of a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcddp.runs.folder import RunFolder
from hpcddp.runs.metrics import MetricsFile
from hpcddp.training.report import Report

PLAN, RANKS = "256 = 2 ranks x 128 x 1", "2 ranks on 1 node (n1), launcher openmpi, gloo on cpu"


def open_report(run: Path | None, training_s: float = 0.0) -> Report:
    group = SimpleNamespace(is_first=True, describe=lambda: RANKS)
    setup: Any = SimpleNamespace(
        group=group,
        folder=None if run is None else RunFolder(str(run)).attempt("1"),
        options=SimpleNamespace(save_every=SimpleNamespace(steps=None)),
    )
    pace: Any = SimpleNamespace(training_s=training_s)
    return Report(setup, MetricsFile(None), pace)


def test_the_start_is_one_line_with_plan_ranks_and_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step, end in ((None, ""), (0, "; resumed from step 0")):
        open_report(tmp_path).start(PLAN, step)
        assert capsys.readouterr().err == f"hpcddp: global batch: {PLAN}; {RANKS}{end}\n"


def test_a_finished_run_has_no_way_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "train"
    (run / "checkpoints/step-00000003").mkdir(parents=True)
    report = open_report(run, training_s=2.0)
    report.start(PLAN, None)
    for step in (1, 2, 3):
        report.step(step, 5123, 0.5)
    for _ in range(2):  # told once
        report.end(3, 10, None, None, 0.123456789, "sha256 ab12")
    _, *lines = capsys.readouterr().err.splitlines()
    assert [line.removesuffix(lines[2].rpartition(", ")[2]) for line in lines] == [
        "hpcddp: run train: finished after step 3, epoch 10",
        "  loss      0.123457 in the last step",
        "  speed     5,123 samples/s, ",
        "  weights   sha256 ab12",
        f"  saved     {run}/checkpoints/step-00000003",
        f"  files     {run}",
    ]


@pytest.mark.parametrize(
    ("stop", "finish", "words"),
    [
        ("deadline", None, "unfinished (deadline)"),
        ("SIGUSR1", None, "unfinished (a signal)"),  # the launcher may have changed the signal
        (None, "no gain", "finished early (no gain)"),
    ],
)
def test_the_end_says_why_and_how_the_run_goes_on(
    stop: str | None, finish: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = open_report(tmp_path / "train")
    report.start(PLAN, None)
    report.end(3, 1, stop, finish, None, None)
    said = capsys.readouterr().err
    assert f"hpcddp: run train: {words} after step 3, epoch 1\n" in said
    assert ("  resume    the same command again" in said) is (stop is not None)
