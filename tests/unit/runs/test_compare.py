"""Deciding about two runs, on values."""

from __future__ import annotations

import pytest

from hpcddp.runs.compare import (
    RunRecord,
    compare_runs,
)
from hpcddp.runs.metrics import MetricLine


def record(losses: dict[int, float | None], weights: dict[int, str] | None = None) -> RunRecord:
    steps = {step: MetricLine("step", step, 0.0, {"loss": loss}) for step, loss in losses.items()}
    return RunRecord("run", steps, [], {}, weights or {})


def test_both_zeros_are_different_bits() -> None:
    assert compare_runs(record({1: 0.0}), record({1: -0.0})).verdict == "different"


@pytest.mark.parametrize(
    ("second", "verdict"),
    [
        (record({1: 1.0, 2: 2.0}, {2: "x"}), "same"),
        (record({1: 1.0, 2: 2.0}), "same so far"),
        (record({2: 2.0}, {2: "x"}), "same"),  # the loss of step 1 went with a killed process
        (record({1: 1.0, 2: 2.0, 3: 3.0}, {2: "x", 3: "z"}), "same so far"),
        (record({1: 1.0, 2: 2.0}, {2: "y"}), "different"),
        (record({1: 1.0, 2: None}, {2: "x"}), "different"),
    ],
)
def test_a_verdict_rests_on_losses_ends_and_weights(second: RunRecord, verdict: str) -> None:
    result = compare_runs(record({1: 1.0, 2: 2.0}, {2: "x"}), second)
    assert result.verdict == verdict
    assert result.is_same == (verdict != "different")
