"""Ranks without a sample keep in step, and what they carry along reaches nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from hpcddp.batchplan import plan_batch
from hpcddp.training.gradient.buffers import frozen_statistics
from hpcddp.training.remarks import find_empty_ranks

RunRanks = Callable[..., Any]


def test_what_an_idle_rank_carries_along_is_in_no_gradient_and_in_no_statistics(
    run_ranks: RunRanks, batch_bodies: ModuleType, tmp_path: Path
) -> None:
    """4 samples in global batches of 3 on 3 ranks: in the second step ranks 1 and 2 have none."""
    run_ranks("batch_bodies:train_normalised", 3, {"folder": str(tmp_path)}).check()
    before, after = (torch.load(tmp_path / f"1-{step}") for step in (1, 2))
    assert torch.equal(before["mean"], after["mean"])
    moved_before, moved = (torch.load(tmp_path / f"0-{step}") for step in (1, 2))
    assert not torch.equal(moved_before["mean"], moved["mean"])
    gradients = [torch.load(tmp_path / f"{rank}-2")["gradient"] for rank in range(3)]
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)
    torch.testing.assert_close(gradients[0], moved["own"], rtol=1e-12, atol=0)


def test_layers_that_meet_other_ranks_are_not_frozen() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.SyncBatchNorm(2))
    with frozen_statistics(model):
        assert [layer.training for layer in model] == [False, True]
    assert [layer.training for layer in model] == [True, True]


@pytest.mark.parametrize(
    ("layer", "length", "words"),
    [
        (nn.SyncBatchNorm(2), 22, "has 2 samples for 3 ranks"),
        (nn.SyncBatchNorm(2), None, "maybe fewer samples than ranks"),
        (nn.SyncBatchNorm(2), 20, None),
        (nn.SyncBatchNorm(2), 23, None),
        (nn.BatchNorm1d(2), 22, None),
    ],
)
def test_only_synchronised_statistics_take_in_what_idle_ranks_carry_along_and_that_is_told(
    layer: nn.Module, length: int | None, words: str | None
) -> None:
    told = find_empty_ranks([nn.Sequential(layer)], plan_batch(10, 3), length)
    assert told is None if words is None else words in told
