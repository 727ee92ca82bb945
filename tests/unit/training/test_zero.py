"""ZeRO-1: each rank has the optimizer's state of its own parameters; the weights are those of DDP, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.xdist_group("parallel")

RunRanks = Callable[..., Any]


def _train(run_ranks: RunRanks, folder: Path, world_size: int, **cases: dict[str, Any]) -> dict[str, dict[str, Any]]:
    arguments = [{**case, "out": str(folder / name)} for name, case in cases.items()]
    run_ranks("parallel_bodies:train_all", world_size, arguments).check()
    return {name: torch.load(folder / name) for name in cases}


def _same(ours: list[list[torch.Tensor]], theirs: list[list[torch.Tensor]]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(torch.equal(a, b) for mine, yours in pairs for a, b in zip(mine, yours, strict=True))


def test_the_weights_are_those_of_ddp_bit_for_bit_and_the_state_is_shared_out(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    results = _train(run_ranks, tmp_path, 3, ddp={"parallel": "ddp"}, zero={"parallel": "zero1"})
    ddp, zero = results["ddp"], results["zero"]
    assert _same(zero["weights"], ddp["weights"])
    assert zero["norms"] == ddp["norms"]
    assert zero["total"] == ddp["total"]
    assert (ddp["states"], zero["states"]) == (8, 1), "rank 0 of 3 owns the largest of 8 parameters"


@pytest.mark.slow
def test_a_gradient_scaler_accumulation_and_exact_mode_work_as_under_ddp(run_ranks: RunRanks, tmp_path: Path) -> None:
    cases = {"scaler": {"scaler": True}, "accumulated": {"max_micro_batch": 2}, "exact": {"exact": True}}
    both = {
        f"{name}-{parallel}": {**case, "parallel": parallel}
        for name, case in cases.items()
        for parallel in ("ddp", "zero1")
    }
    results = _train(run_ranks, tmp_path, 2, **both)
    for name in cases:
        ours, theirs = results[f"{name}-zero1"]["weights"], results[f"{name}-ddp"]["weights"]
        assert _same(ours, theirs), name


def test_an_optimizer_whose_parameters_step_together_is_refused(run_ranks: RunRanks) -> None:
    told = run_ranks("parallel_bodies:share_wrongly", 2).check().outputs[0]
    assert "this LBFGS steps all parameters together" in told
    assert "this ZeroRedundancyOptimizer is ZeRO already" in told
