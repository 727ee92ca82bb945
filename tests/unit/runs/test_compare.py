"""Deciding about two runs, on values."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.runs.compare import (
    LossDifference,
    RunRecord,
    compare_runs,
    describe_attempt,
    describe_comparison,
    find_causes,
    format_comparison,
)
from hpcddp.runs.metrics import StepLine

EXACT = {"mode": ("exact (tree)",)}
PLAIN = {"mode": ("plain",)}


def causes(*differed: str, begins: int = 1, rate: int | None = None, first: Any = PLAIN, second: Any = PLAIN) -> str:
    return "\n".join(find_causes(begins, differed, rate, first, second))


def record(losses: dict[int, float | None], weights: dict[int, str] | None = None, **facts: Any) -> RunRecord:
    steps = {step: StepLine(step, 0, loss, lr=0.1, samples_per_s=9.0, time=0.0) for step, loss in losses.items()}
    return RunRecord("run", steps, [], {}, weights or {}, {name: tuple(values) for name, values in facts.items()})


def test_ranks_explain_a_difference_of_plain_runs_only() -> None:
    assert causes("ranks").startswith("ranks: ")
    assert causes("ranks", second=EXACT).startswith("ranks: ")
    assert "ranks" not in causes("ranks", "nodes", "plan.accumulation_steps", first=EXACT, second=EXACT)


def test_what_acts_through_the_updates_cannot_explain_the_first_loss() -> None:
    assert "optimizer" not in causes("optimizer.momentum", begins=1)
    assert causes("optimizer.momentum", begins=2).startswith("optimizer.momentum: ")
    assert "learning rate" not in causes(rate=3, begins=3)
    assert "learning rates differ from step 3 on" in causes(rate=3, begins=4)


def test_something_is_said_where_nothing_explains_it() -> None:
    assert causes("job.launcher", "hosts", first=EXACT, second=EXACT).startswith(
        "nothing that was recorded explains it"
    )


def test_kernels_in_no_fixed_order_are_named_on_a_gpu_only() -> None:
    gpu = {"gpu": ("NVIDIA H200",)}
    assert "use_deterministic_algorithms" in causes(first=gpu | {"deterministic": (False,)}, second=gpu)
    fixed = gpu | {"deterministic": (True,)}
    assert "use_deterministic_algorithms" not in causes(first=fixed, second=fixed)
    assert "use_deterministic_algorithms" not in causes(first={"gpu": (None,)}, second={"gpu": (None,)})


@pytest.mark.parametrize(
    ("versions", "mode"),
    [({"exact": "tree"}, "exact (tree)"), ({"exact": None}, "plain"), ({"plan": {"slices": 8}}, "exact"), ({}, None)],
)
def test_the_mode_is_what_the_attempt_recorded(versions: dict[str, Any], mode: str | None) -> None:
    assert describe_attempt(versions).get("mode") == mode


def test_ranks_and_nodes_are_counted() -> None:
    facts = describe_attempt({"ranks": [{"host": "a"}, {"host": "b"}, {"host": "a"}]})
    assert (facts["ranks"], facts["nodes"], facts["hosts"]) == (3, 2, "a, b")


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_neighbour_is_one_ulp_away(loss: float) -> None:
    neighbour = math.nextafter(loss, math.inf)
    assert LossDifference(1, (loss, neighbour)).ulps == LossDifference(1, (neighbour, loss)).ulps == 1


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
    assert result.verdict == describe_comparison(result)["verdict"] == verdict
    assert result.is_same == (verdict != "different")


def test_a_chain_of_attempts_shows_each_value() -> None:
    one, chain = record({1: 1.0}, {1: "x"}, ranks=[1]), record({1: 1.0}, {1: "x"}, ranks=[4, 2, 8])
    text = format_comparison(compare_runs(one, chain))
    assert "what differed all the same" in text
    assert "ranks  1    4 -> 2 -> 8" in text


def test_weights_that_differ_before_the_losses_do_date_the_difference() -> None:
    facts = {"mode": ["plain"]}
    one = record({1: 1.0, 2: 1.0, 3: 1.0}, {1: "x"}, **facts)
    other = record({1: 1.0, 2: 1.0, 3: 2.0}, {1: "y"}, **facts, **{"optimizer.momentum": [0.5]})
    result = compare_runs(one, other)
    assert result.first_difference.step == 3
    assert result.causes[0].startswith("optimizer.momentum: ")


def test_another_split_of_the_model_explains_a_difference() -> None:
    assert causes("parallel").startswith("parallel: another split")
