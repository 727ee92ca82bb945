"""Deciding about two runs, on values."""

from __future__ import annotations

from typing import Any

import pytest

from hpcddp.runs.compare import (
    RunRecord,
    compare_runs,
    describe_attempt,
    format_comparison,
)
from hpcddp.runs.metrics import StepLine
from hpcddp.runs.state import Versions


def record(losses: dict[int, float | None], weights: dict[int, str] | None = None, **facts: Any) -> RunRecord:
    steps = {step: StepLine(step, 0, loss, lr=0.1, samples_per_s=9.0, time=0.0) for step, loss in losses.items()}
    return RunRecord("run", steps, [], {}, weights or {}, {name: tuple(values) for name, values in facts.items()})


@pytest.mark.parametrize(
    ("versions", "mode"),
    [({"exact": "tree"}, "exact (tree)"), ({"exact": None}, "plain"), ({"plan": {"slices": 8}}, "exact")],
)
def test_the_mode_is_what_the_attempt_recorded(versions: dict[str, Any], mode: str) -> None:
    assert describe_attempt(Versions(**versions)).get("mode") == mode


def test_ranks_and_nodes_are_counted() -> None:
    facts = describe_attempt(Versions(ranks=[{"host": "a"}, {"host": "b"}, {"host": "a"}]))
    assert (facts["ranks"], facts["nodes"], facts["hosts"]) == (3, 2, "a, b")


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


def test_a_chain_of_attempts_shows_each_value() -> None:
    one, chain = record({1: 1.0}, {1: "x"}, ranks=[1]), record({1: 1.0}, {1: "x"}, ranks=[4, 2, 8])
    text = format_comparison(compare_runs(one, chain))
    assert "what differed all the same" in text
    assert "ranks  1    4 -> 2 -> 8" in text
