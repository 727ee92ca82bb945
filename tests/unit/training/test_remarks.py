"""Ranks without a sample keep in step, and what they carry along reaches nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hpcddp
from hpcddp.batchplan import plan_batch
from hpcddp.training.epochs import find_empty_ranks
from hpcddp.training.gradient.buffers import frozen_statistics

RunRanks = Callable[..., Any]


def test_what_an_idle_rank_carries_along_is_in_no_gradient_and_in_no_statistics(
    run_ranks: RunRanks, tmp_path: Path
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


class Frozen(nn.BatchNorm1d):
    """Never in training mode."""

    def train(self, mode: bool = True) -> Frozen:
        return super().train(False)


@pytest.mark.parametrize("mode", [True, False])
def test_statistics_stay_frozen_where_the_loop_calls_train_and_its_last_call_counts_afterwards(mode: bool) -> None:
    model, other = nn.Sequential(nn.BatchNorm1d(2), Frozen(2)), nn.BatchNorm1d(2)
    method = vars(type(other)).get("train")
    model.train(not mode)
    with frozen_statistics(model), frozen_statistics(nn.InstanceNorm1d(2)):
        model.train(mode)
        assert [layer.training for layer in (model, *model)] == [mode, False, False]
        copied = copy.deepcopy(model).train()
        assert [layer.training for layer in copied] == [True, False]
        assert not other.eval().training
        model(torch.randn(1, 2))
    assert [layer.training for layer in model] == [mode, False]
    assert not model[0].running_mean.any()
    assert vars(type(other)).get("train") is method
    assert model.train()[0].training


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
                        model.train()
                        assert not model[0].training
                        raise KeyError
                prepared[1].step()

    with pytest.raises(KeyError):
        train()
    assert model[0].training
    assert not model.eval()[0].training


@pytest.mark.parametrize(
    ("layer", "length", "largest", "is_told"),
    [
        (nn.SyncBatchNorm(2), 22, 4, True),  # the last batch has 2 samples for 3 ranks
        (nn.SyncBatchNorm(2), None, 4, True),
        (nn.SyncBatchNorm(2), 20, 4, False),
        (nn.SyncBatchNorm(2), 23, 4, False),
        (nn.SyncBatchNorm(2), 20, 1, True),  # shares of 4, 3 and 3 in 4 passes
        (nn.BatchNorm1d(2), 22, 4, False),
    ],
)
def test_only_synchronised_statistics_take_in_what_idle_ranks_carry_along_and_that_is_told(
    layer: nn.Module, length: int | None, largest: int, is_told: bool
) -> None:
    told = find_empty_ranks([nn.Sequential(layer)], plan_batch(10, 3, largest), length)
    assert bool(told and "10 = 3 ranks x" in told) is is_told
