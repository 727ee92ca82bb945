"""The learning rate depends on the step alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RunRanks = Callable[..., Any]


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
