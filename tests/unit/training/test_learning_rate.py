"""The learning rate: what is said of it, and that it depends on the step alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcddp.errors import RequestError
from hpcddp.trainer.learning_rate import plan_rate

RunRanks = Callable[..., Any]


@pytest.mark.parametrize(
    ("optimizer", "rule", "rate", "words"),
    [
        ("sgd", "linear", 0.4, "learning rate 0.1 -> 0.4 by the rule linear, batch 64 -> 256"),
        ("adamw", "sqrt", 0.2, "learning rate 0.1 -> 0.2 by the rule sqrt, batch 64 -> 256"),
        ("adamw", "linear", 0.4, "for adamw: --lr-rule sqrt (with betas and eps adjusted: Malladi et al. 2022"),
        ("sgd", "none", 0.1, "0.1 as it is, batch 64 -> 256; for sgd: --lr-rule linear (with a warm-up of some epochs"),
    ],
)
def test_another_global_batch_than_the_tuned_one_is_never_silent(
    optimizer: str, rule: str, rate: float, words: str
) -> None:
    peak = plan_rate(0.1, optimizer, rule, 64, 256)
    assert peak.learning_rate == pytest.approx(rate)
    assert words in peak.remark


@pytest.mark.parametrize(("rule", "base"), [("none", None), ("none", 256), ("linear", 256), ("sqrt", 256)])
def test_the_same_global_batch_keeps_the_learning_rate(rule: str, base: int | None) -> None:
    assert plan_rate(0.1, "sgd", rule, base, 256) == (0.1, None)


def test_a_rule_without_the_batch_it_starts_from_is_refused() -> None:
    with pytest.raises(RequestError, match="--lr-rule linear needs the global batch"):
        plan_rate(0.1, "sgd", "linear", None, 256)


def test_the_trainer_scales_tells_and_records_its_learning_rate(run_ranks: RunRanks, tmp_path: Path) -> None:
    options = [
        "--model",
        "shufflenet_v2_x0_5",
        "--dataset",
        "fake",
        "--global-batch",
        "100",
        "--limit-steps",
        "2",
        "--max-micro-batch",
        "25",
    ]
    rule = ["--lr", "0.01", "--lr-rule", "linear", "--base-batch", "50"]
    outcome = run_ranks("train_reference", 2, [*options, *rule, "--run-dir", str(tmp_path)]).check()
    assert "learning rate 0.01 -> 0.02 by the rule linear, batch 50 -> 100" in outcome.outputs[0]
    [recorded] = tmp_path.glob("attempts/*/options.json")
    assert {"lr_rule": "linear", "base_batch": 50, "lr": 0.01}.items() <= json.loads(recorded.read_text()).items()


@pytest.mark.slow
def test_the_scheduler_steps_once_per_optimizer_step_on_any_number_of_ranks(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    rates = []
    for world_size, largest in ((1, None), (1, 3), (2, 2), (4, None)):
        run_dir = tmp_path / f"{world_size}-{largest}"
        argument = {"global_batch": 5, "epochs": 3, "run_dir": str(run_dir), "max_micro_batch": largest}
        run_ranks("train_toy", world_size, argument).check()
        [metrics] = run_dir.glob("attempts/*/metrics.jsonl")
        steps = [line for line in map(json.loads, metrics.read_text().splitlines()) if line["kind"] == "step"]
        rates.append([(line["step"], line["lr"]) for line in steps])
    expected = [(step, pytest.approx(0.05 * 0.1 ** (step // 3))) for step in range(1, 16)]  # StepLR(3)
    assert rates == [expected] * 4
