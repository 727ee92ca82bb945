"""What a resumed attempt loaded and its script changed before the first step is found; the same numbers are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import hpcddp
from hpcddp.errors import RequestError

After = Callable[[nn.Module, torch.optim.Optimizer], object]  # what a script does after rt.prepare


def attempt(folder: Path, after: After, stop: int, *, outside: bool = False) -> None:
    """Train to this step and stop."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    data = DataLoader(TensorDataset(torch.randn(8, 2), torch.ones(8, 2)), batch_size=2)
    with hpcddp.runtime(run_dir=str(folder)) as rt:
        model, optimizer, loader = rt.prepare(model, optimizer, data)
        after(model, optimizer)
        for _ in range(1) if outside else rt.epochs(2):
            for x, y in loader:
                optimizer.zero_grad()
                rt.backward(mse_loss(model(x), y))
                optimizer.step()
                if rt.steps == stop - 1:
                    rt.stop("the test")


def initialise(model: nn.Module, _optimizer: Any) -> None:
    model[0].weight.data.normal_()  # torch counts no change of a tensor's `data`


def overwrite(model: nn.Module, _optimizer: Any) -> None:
    model.load_state_dict({name: torch.ones_like(one) for name, one in model.state_dict().items()})


def forget_moments(_model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"] = torch.zeros_like(state["exp_avg"])


@pytest.mark.parametrize(
    ("after", "thing"),
    [
        (initialise, "weights of model"),
        (forget_moments, "state of optimizer"),
        (overwrite, "weights of model"),
    ],
)
def test_what_is_changed_after_prepare_is_refused_when_a_run_resumes(tmp_path: Path, after: After, thing: str) -> None:
    attempt(tmp_path / "run", after, 2)  # right in the first attempt
    with pytest.raises(RequestError, match=f"resumed from step 2, and the {thing} changed") as told:
        attempt(tmp_path / "run", after, 4)
    assert told.value.hint.endswith("before rt.prepare, or under `if rt.steps == 0:`")


def test_the_same_in_a_loop_outside_of_rt_epochs(tmp_path: Path) -> None:
    attempt(tmp_path / "run", initialise, 2, outside=True)
    with pytest.raises(RequestError, match=r"0\.weight has other numbers than the checkpoint"):
        attempt(tmp_path / "run", initialise, 4, outside=True)


def harmless(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """What right scripts do there."""
    model(torch.randn(4, 2))  # moves BatchNorm's running statistics
    model.load_state_dict(model.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    model.to(memory_format=torch.channels_last).eval()
    model.train()


def test_what_has_the_same_numbers_still_is_not_mentioned(tmp_path: Path) -> None:
    for stop in (2, 3):
        attempt(tmp_path / "run", harmless, stop)
