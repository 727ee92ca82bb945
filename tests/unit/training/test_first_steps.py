"""What the losses of the first steps show: a sum, or a mean over parts that are not spread evenly."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from hpcddp.training.gate.unprepared import is_summed

RunRanks = Callable[..., Any]
Z = torch.zeros(32, 4)


def summed(x: Tensor) -> Tensor:
    return mse_loss(x, Z, reduction="sum")


SUMS: list[Callable[[Tensor], Tensor]] = [
    summed,
    lambda x: summed(x) + 0.1 * x.square().sum(),
    lambda x: binary_cross_entropy_with_logits(x, Z, reduction="sum") - 0.5 * torch.sum(1 + x - x.exp()),
    lambda x: 0.5 * summed(x),
    lambda x: sum(0.3 * (summed(x) + x.sum()) for _ in range(3)),
    lambda x: 1e-4 * x.pow(2).sum() + summed(x),
]
NO_SUMS: list[Callable[[Tensor], Tensor]] = [
    lambda x: summed(x) / len(x),
    lambda x: (summed(x) + x.square().sum()) / x.numel(),
    lambda x: summed(x) * (1 / len(x)),
    lambda x: summed(x) * (1 / x.numel()) + 1e-4 * x.pow(2).sum(),
    lambda x: summed(x) / len(x) + 1e-4 * x.pow(2).sum(),
    lambda x: cross_entropy(x, torch.zeros(32, dtype=torch.long)) + 1e-4 * summed(x),
    lambda x: (x - 1).square().mean() + 1e-4 * summed(x),
    lambda x: cross_entropy(x, torch.zeros(32, dtype=torch.long)) + 1e-4 * x.pow(2).sum(),
    lambda x: x.square().mean() + 1e-4 * x.pow(2).sum(),
    lambda x: summed(x) * x.mean(),
    lambda x: x.sum() * 0,
]


@pytest.mark.parametrize("is_sum", [True, False])
def test_a_sum_is_seen_through_other_terms_and_is_none_where_something_divides_it(is_sum: bool) -> None:
    for nth, loss in enumerate(SUMS if is_sum else NO_SUMS):
        x = torch.full((32, 4), 0.5, requires_grad=True)
        assert is_summed(loss(x).grad_fn, 32) is is_sum, nth
    assert not is_summed(None, 32)


def test_the_parts_of_one_step_are_compared_over_the_ranks(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks("first_steps_bodies:warn_of_losses", 2, str(tmp_path)).check()
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert "more or fewer parts in one micro batch than in another" in first.pop("another share on rank 1 only")
    assert set(first.values()) | set(second.values()) == {""}
