"""ZeRO-1: each rank has the optimizer's state of its own parameters; the weights are those of DDP, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcddp.errors import RequestError
from hpcddp.training.parallel.zero import WholeSteps

pytestmark = pytest.mark.xdist_group("parallel")

RunRanks = Callable[..., Any]


def _train(run_ranks: RunRanks, folder: Path, world_size: int, **cases: dict[str, Any]) -> dict[str, dict[str, Any]]:
    arguments = [{**case, "out": str(folder / name)} for name, case in cases.items()]
    run_ranks("parallel_bodies:train_all", world_size, arguments).check()
    return {name: torch.load(folder / name) for name in cases}


def _same(ours: list[list[torch.Tensor]], theirs: list[list[torch.Tensor]]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(torch.equal(a, b) for mine, yours in pairs for a, b in zip(mine, yours, strict=True))


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "a scaler that leaves a step out": {"scaler": True, "overflow_at": 1},
    "a subclass that calls super().step()": {"subclass": True},  # torch hooks that one too by now
}


@pytest.mark.parametrize(
    ("ranks", "split", "options"), [(3, "zero1", {}), pytest.param(2, "fsdp", {"exact": True}, id="exact shards")]
)
def test_what_optimizers_step_is_the_step_of_ddp_bit_for_bit(
    run_ranks: RunRanks, tmp_path: Path, ranks: int, split: str, options: dict[str, Any]
) -> None:
    arguments = {
        f"{name}, {parallel}": {**case, **options, "epochs": 1, "parallel": parallel}
        for name, case in CASES.items()
        for parallel in ("ddp", split)
    }
    results = _train(run_ranks, tmp_path, ranks, **arguments)
    for name in CASES:
        ours, theirs = (results[f"{name}, {parallel}"] for parallel in (split, "ddp"))
        assert _same(ours["weights"], theirs["weights"]), name
        assert ours["steps"] == theirs["steps"] == 3, name
    ours, theirs = (results[f"plain, {parallel}"] for parallel in (split, "ddp"))
    assert (ours["norms"], ours["total"]) == (theirs["norms"], theirs["total"])
    if split == "zero1":
        assert (theirs["states"], ours["states"]) == (8, 1), "rank 0 of 3 owns the largest of 8 parameters"


def test_a_closure_is_refused() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    with ExitStack() as until_end:
        WholeSteps(optimizer).hook(until_end)
        with pytest.raises(RequestError, match="take no closure"):
            optimizer.step(lambda: 0.0)
