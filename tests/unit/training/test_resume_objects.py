"""Resumed with other objects than the checkpoint's: refused, where torch would give a state to the wrong one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

import hpcddp
from hpcddp.errors import RequestError

Objects = tuple[list[nn.Module], list[Any]]  # models, and what else rt.prepare is given
Make = Callable[[], Objects]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Any) -> Any:
        return self.g(torch.tanh(self.f(x)))


def plain() -> Objects:
    model = Net()
    return [model], [Adam(model.parameters(), lr=0.1)]


def reordered() -> Objects:
    model = Net()
    return [model], [Adam([*model.g.parameters(), *model.f.parameters()], lr=0.1)]


def grouped(*kinds: int) -> Objects:
    """Weights and biases in a group each, in this order."""
    model = Net()
    return [model], [Adam([{"params": [p for p in model.parameters() if p.dim() == kind]} for kind in kinds], lr=0.1)]


def two(*, swap: bool = False) -> Objects:
    models: list[nn.Module] = [Net(), Net()]
    return models[:: -1 if swap else 1], [Adam(model.parameters(), lr=0.1) for model in models]


def attempt(folder: Path, make: Make, *, stop: int = 3) -> None:
    """Train to this step, of 4 in an epoch, and stop."""
    torch.manual_seed(0)
    models, others = make()
    loader = DataLoader(TensorDataset(torch.ones(8, 2), torch.ones(8, 2)), batch_size=2, shuffle=True)
    with hpcddp.runtime(run_dir=str(folder)) as rt:
        prepared = rt.prepare(*models, *others, loader)
        for _ in rt.epochs(2):
            for x, y in prepared[-1]:
                rt.backward(sum((mse_loss(model(x), y) for model in prepared[: len(models)]), torch.zeros(())))
                for thing in prepared[len(models) : -1]:
                    thing.step()
                for thing in prepared[len(models) : -1]:
                    getattr(thing, "zero_grad", lambda: None)()
                if rt.steps == stop - 1:
                    rt.stop("the test")


NEITHER = "keep the parameters and their order as they were; a run of its own: another run_dir"
REFUSED: dict[str, tuple[Make, Make, str]] = {
    "parameters in another order": (plain, reordered, "optimizer.parameters: model.f.weight model.f.bias"),
    "two models swapped": (two, lambda: two(swap=True), "optimizer.parameters: model.f.weight"),
    "groups swapped": (lambda: grouped(2, 1), lambda: grouped(1, 2), "optimizer[1].parameters: model.f.bias"),
    "a group more": (plain, lambda: grouped(2, 1), "optimizer[1]: none -> Adam"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_objects_that_would_get_a_state_of_others_are_refused(tmp_path: Path, name: str) -> None:
    before, after, words = REFUSED[name]
    attempt(tmp_path / "run", before)
    with pytest.raises(RequestError) as refused:
        attempt(tmp_path / "run", after, stop=6)
    assert words in str(refused.value)
    assert str(refused.value).endswith(NEITHER)
    if name == "parameters in another order":
        attempt(tmp_path / "run", before, stop=4)  # the run is as it was
