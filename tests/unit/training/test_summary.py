"""What rank 0 prints at the start and at the end of a run."""

from __future__ import annotations

from typing import Any

import pytest

from hpcddp.training.report import Summary, format_first_line, format_summary

PLAN, RANKS = "256 = 2 ranks x 128 x 1", "2 ranks on 1 node (n1), launcher openmpi, gloo on cpu"


def test_the_start_is_one_line_with_plan_ranks_and_step() -> None:
    assert format_first_line(PLAN, RANKS, None, saves=True) == f"global batch: {PLAN}; {RANKS}"
    assert format_first_line(PLAN, RANKS, 0, saves=True).endswith(f"{RANKS}; resumed from step 0")
    assert format_first_line(PLAN, RANKS, None, saves=False).endswith("; no run folder: nothing is saved")


def test_a_finished_run_has_no_way_to_go_on() -> None:
    text = format_summary(
        Summary(
            70,
            "train",
            epochs=10,
            loss=0.123456789,
            samples_per_s=5123.4,
            seconds=3661,
            weights_sha256="ab12",
            checkpoint="runs/train/checkpoints/step-00000070",
            run="runs/train",
            resume_with="the same command again",
        ),
    )
    assert text.splitlines() == [
        "train: finished after step 70, epoch 10",
        "  loss      0.123457 in the last step",
        "  speed     5,123 samples/s, 1:01:01 in all",
        "  weights   sha256 ab12",
        "  saved     runs/train/checkpoints/step-00000070",
        "  files     runs/train",
    ]


@pytest.mark.parametrize(
    ("known", "lines"),
    [
        (
            {"stop_reason": "deadline", "resume_with": "the same command again"},
            ["train: unfinished (deadline) after step 3", "  resume    the same command again"],
        ),
        # the launcher may have changed the signal
        ({"stop_reason": "SIGUSR1"}, ["train: unfinished (a signal) after step 3"]),
        ({"finish_reason": "no gain"}, ["train: finished early (no gain) after step 3"]),
        (
            {"weights_sha256": "ab12", "is_exact": True},
            ["train: finished after step 3", "  weights   sha256 ab12, the same on any number of ranks"],
        ),
    ],
)
def test_the_end_says_why_and_how_the_run_goes_on(known: dict[str, Any], lines: list[str]) -> None:
    assert format_summary(Summary(3, "train", **known)).splitlines() == lines
