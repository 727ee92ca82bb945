"""An optimizer that makes another one step, as for sharpness-aware minimization (SAM): both are prepared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import hpcddp
from hpcddp.errors import RequestError
from hpcddp.training import mistakes

from .kind_bodies import Sam


def make_parts() -> tuple[nn.Module, Sam, TensorDataset]:
    torch.manual_seed(3)
    model = nn.Linear(4, 3, dtype=torch.float64)
    return (
        model,
        Sam(model.parameters(), lr=0.1, momentum=0.9),
        TensorDataset(torch.randn(24, 4, dtype=torch.float64), torch.arange(24) % 3),
    )


def train(*, both: bool = True, folder: Path | None = None, stop_at: int | None = None) -> nn.Module:
    model, optimizer, data = make_parts()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.base_optimizer, 2)
    objects = [optimizer, optimizer.base_optimizer] if both else [optimizer]
    with hpcddp.runtime(run_dir=folder) as rt:
        net, *_, loader = rt.prepare(model, *objects, scheduler, DataLoader(data, batch_size=6))
        for _ in rt.epochs(2):
            for x, y in loader:
                rt.backward(cross_entropy(net(x), y))
                optimizer.first_step()
                rt.backward(cross_entropy(net(x), y))
                optimizer.second_step()
                scheduler.step()
                if rt.steps + 1 == stop_at:
                    rt.stop("a test")
        assert optimizer.param_groups is optimizer.base_optimizer.param_groups
    return model


def test_sam_gives_the_weights_of_plain_torch_also_after_a_resume(tmp_path: Path) -> None:
    model, optimizer, data = make_parts()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.base_optimizer, 2)
    for _ in range(2):
        for x, y in DataLoader(data, batch_size=6):
            cross_entropy(model(x), y).backward()
            optimizer.first_step()
            cross_entropy(model(x), y).backward()
            optimizer.second_step()
            scheduler.step()
    train(folder=tmp_path, stop_at=3)
    for found in (train(), train(folder=tmp_path)):
        assert torch.allclose(found.weight, model.weight, rtol=0, atol=1e-12)


def test_an_inner_optimizer_that_is_not_prepared_is_refused() -> None:
    with pytest.raises(RequestError) as error:
        train(both=False)
    assert str(error.value) == str(mistakes.STEP_NOT_PREPARED.error(kind="SGD"))
