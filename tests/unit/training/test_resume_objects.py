"""Resumed with other objects than the checkpoint's: refused, where torch would give a state to the wrong one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adagrad, Adam, AdamW, RAdam, RMSprop
from torch.optim.lr_scheduler import ExponentialLR, LinearLR
from torch.utils.data import DataLoader, TensorDataset

import hpcddp
from hpcddp.errors import RequestError

Objects = tuple[list[nn.Module], list[Any]]  # models, and what else rt.prepare is given
Make = Callable[[], Objects]


class Net(nn.Module):
    """Layers that can be declared in another order."""

    def __init__(self, order: str = "fg") -> None:
        super().__init__()
        for name in order:
            self.add_module(name, nn.Linear(2, 2))

    def forward(self, x: Any) -> Any:
        return self.g(torch.tanh(self.f(x)))


def adam(model: nn.Module) -> Any:
    return Adam(model.parameters(), lr=0.1)


def plain(optimizer: Any = Adam, order: str = "fg") -> Objects:
    model = Net(order)
    return [model], [optimizer(model.parameters(), lr=0.1)]


def reordered() -> Objects:
    model = Net()
    return [model], [Adam([*model.g.parameters(), *model.f.parameters()], lr=0.1)]


def grouped(*kinds: int) -> Objects:
    """Weights and biases in a group each, in this order."""
    model = Net()
    return [model], [Adam([{"params": [p for p in model.parameters() if p.dim() == kind]} for kind in kinds], lr=0.1)]


def fewer() -> Objects:
    model = Net()
    return [model], [Adam(model.f.parameters(), lr=0.1)]


def two(*, swap_optimizers: bool = False, swap_models: bool = False) -> Objects:
    models: list[nn.Module] = [Net(), Net()]
    optimizers = [adam(model) for model in models]
    return models[:: -1 if swap_models else 1], optimizers[:: -1 if swap_optimizers else 1]


def scheduled(scheduler: Any) -> Objects:
    models, others = plain()
    return models, [*others, scheduler(others[0])]


def attempt(folder: Path, make: Make, *, stop: int = 3, accept: Any = ()) -> None:
    """Train to this step, of 4 in an epoch, and stop."""
    torch.manual_seed(0)
    models, others = make()
    loader = DataLoader(TensorDataset(torch.ones(8, 2), torch.ones(8, 2)), batch_size=2, shuffle=True)
    with hpcddp.runtime(run_dir=str(folder), accept=accept) as rt:
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
    "layers declared in another order": (plain, lambda: plain(order="gf"), "model.parameters: f.weight 2x2 f.bias 2"),
    "two optimizers swapped": (two, lambda: two(swap_optimizers=True), "optimizer_2.parameters: model_2.f.weight"),
    "two models swapped": (two, lambda: two(swap_models=True), "optimizer.parameters: model.f.weight"),
    "groups swapped": (lambda: grouped(2, 1), lambda: grouped(1, 2), "optimizer[1].parameters: model.f.bias"),
    "a group more": (plain, lambda: grouped(2, 1), "optimizer[1]: none -> Adam"),
    "fewer parameters": (plain, fewer, "optimizer.parameters: model.g.weight model.g.bias -> none"),
}
ACCEPTED: dict[str, tuple[Make, Make, str]] = {
    "SGD after Adam": (plain, lambda: plain(SGD), "optimizer.class: Adam -> SGD"),
    "RMSprop after Adagrad": (lambda: plain(Adagrad), lambda: plain(RMSprop), "optimizer.class: Adagrad -> RMSprop"),
    "RAdam after Adam": (plain, lambda: plain(RAdam), "optimizer.class: Adam -> RAdam"),
    "another scheduler": (
        lambda: scheduled(lambda optimizer: ExponentialLR(optimizer, 0.9)),
        lambda: scheduled(LinearLR),
        "scheduler.class: ExponentialLR -> LinearLR",
    ),
}


# one of each kind; the others are long tests
FAST = ("parameters in another order", "two models swapped", "groups swapped", "a group more", "SGD after Adam")


def marked(names: Iterable[str]) -> list[Any]:
    return [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", marked(REFUSED))
def test_objects_that_would_get_a_state_of_others_are_refused(tmp_path: Path, name: str) -> None:
    before, after, words = REFUSED[name]
    attempt(tmp_path / "run", before)
    with pytest.raises(RequestError) as refused:
        attempt(tmp_path / "run", after, stop=6)
    assert words in str(refused.value)
    assert str(refused.value).endswith(NEITHER)
    if name == FAST[0]:
        attempt(tmp_path / "run", before, stop=4)  # the run is as it was


@pytest.mark.parametrize("name", marked(ACCEPTED))
def test_another_class_is_refused_and_once_accepted_begins_with_no_state(tmp_path: Path, name: str) -> None:
    before, after, words = ACCEPTED[name]
    attempt(tmp_path / "run", before)
    with pytest.raises(RequestError) as refused:
        attempt(tmp_path / "run", after, stop=6)
    assert words in str(refused.value)
    attempt(tmp_path / "run", after, stop=6, accept=words.partition(".")[0])


def test_adam_and_adamw_read_each_others_state_once_it_is_accepted(tmp_path: Path) -> None:
    made: list[Any] = []

    def make(kind: Any) -> Objects:
        objects = plain(kind)
        made.append(objects[1][0])
        return objects

    for stop, optimizer in ((2, Adam), (3, AdamW), (4, Adam)):
        attempt(tmp_path / "run", lambda kind=optimizer: make(kind), stop=stop, accept=["optimizer"] if made else ())
    assert [one.param_groups[0]["weight_decay"] for one in made] == [0, 0.01, 0]
    assert [one.param_groups[0].get("decoupled_weight_decay", False) for one in made][::2] == [False, False]
    assert {float(state["step"]) for state in made[-1].state.values()} == {4.0}


def test_a_group_that_was_added_in_the_loop_has_to_come_before_prepare(tmp_path: Path) -> None:
    def late() -> Objects:
        models, others = fewer()
        add = {"params": list(models[0].g.parameters())}
        step = others[0].step

        def step_of_two(*arguments: Any) -> Any:
            if len(others[0].param_groups) == 1:
                others[0].add_param_group(add)
            return step(*arguments)

        others[0].step = step_of_two
        return models, others

    attempt(tmp_path / "run", late)
    with pytest.raises(
        RequestError, match="has 2 parameter groups of optimizer, and the script has given it 1 by"
    ) as told:
        attempt(tmp_path / "run", late)
    assert told.value.hint.startswith("optimizer.add_param_group({…}) before rt.prepare")
