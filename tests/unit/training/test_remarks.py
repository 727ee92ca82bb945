"""Ranks without a sample keep in step, and what they carry along reaches nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hpcddp
from hpcddp.training.gradient.buffers import frozen_statistics

RunRanks = Callable[..., Any]


def test_what_an_idle_rank_carries_along_is_in_no_gradient_and_in_no_statistics(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    """4 samples in global batches of 3 on 3 ranks: in the second step ranks 1 and 2 have none."""
    run_ranks("batch_bodies:train_normalised", 3, {"folder": str(tmp_path)}).check()
    assert torch.equal(torch.load(tmp_path / "1-1")["mean"], torch.load(tmp_path / "1-end"))
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


def test_a_body_that_ends_by_an_exception_leaves_nothing_frozen() -> None:
    data = TensorDataset(torch.randn(4, 2, 3), torch.zeros(4))
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(6, 1))

    def train() -> None:
        with hpcddp.runtime(exact=True, slices=3) as rt:
            prepared = rt.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), DataLoader(data, batch_size=3))
            for batch in prepared[2]:
                prepared[1].zero_grad()
                for x, _ in rt.micro_batches(batch):
                    rt.backward(model(x).mean())
                    if rt.samples == 0:
                        assert not model[0].training
                        raise KeyError
                prepared[1].step()

    with pytest.raises(KeyError):
        train()
    assert model[0].training
    assert not model.eval()[0].training
