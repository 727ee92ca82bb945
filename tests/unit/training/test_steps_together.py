"""Which optimizers step their parameters together: a rank that steps a part of them would take another step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer

from hpcddp.training.parallel.zero import steps_together

pytestmark = pytest.mark.torch_compat

Parameters = Iterable[Any]


class _Own(Optimizer):
    """Of a script: `factor` says how it takes the gradients of all parameters together."""

    factor: Callable[[Any, list[Tensor]], float]

    def __init__(self, parameters: Parameters, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})
        self.steps = 0  # torch's own copy of an optimizer would lose it
        self.largest = 0.01

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        factor = self.factor([p.grad for p in held])
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] * factor)


class OverNorm(_Own):
    def factor(self, gradients: list[Tensor]) -> float:
        return 1 / float(torch.sqrt(sum(g.square().sum() for g in gradients)))


class Clipped(_Own):
    def factor(self, gradients: list[Tensor]) -> float:
        return min(1.0, 0.5 / float(torch.nn.utils.get_total_norm(gradients)))


class LargestSoFar(_Own):
    """A number over all parameters that grows up to a bound, as in D-Adaptation and Prodigy."""

    def factor(self, gradients: list[Tensor]) -> float:
        self.largest = max(self.largest, min(0.1, 0.01 * sum(float(g.abs().sum()) for g in gradients)))
        return self.largest


class Plain(_Own):
    def factor(self, gradients: list[Tensor]) -> float:
        return 1 / self.steps


class Noisy(Optimizer):
    """Random numbers, a trust ratio for each parameter, and a state that it makes at once."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters, {"lr": 0.0})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["mean"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                mean = self.state[parameter]["mean"].mul_(0.9).add_(parameter.grad)
                ratio = float(parameter.norm() / mean.norm())
                parameter.add_(mean + torch.randn_like(parameter), alpha=-group["lr"] * ratio)


class WithArgument(Plain):
    def step(self, loss: Tensor) -> None:  # type: ignore[override]
        super().step()


class Inside(Optimizer):
    """One that steps another one, whose groups it has."""

    def __init__(self, parameters: Parameters, kind: type[Optimizer]) -> None:
        self.inner = kind(parameters, lr=0.1)
        super().__init__(self.inner.param_groups, {})
        self.param_groups = self.inner.param_groups

    def step(self, closure: Any = None) -> None:
        self.inner.step()


class Exchanging(Plain):
    """Its step has a collective."""

    made = False

    def step(self, closure: Any = None) -> None:
        dist.all_reduce(self.param_groups[0]["params"][0].grad)
        type(self).made = True


def _lay_out() -> list[dict[str, Any]]:
    layers = [nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 300)]
    return [{"params": [*layer.parameters()]} for layer in layers]


TOGETHER: dict[str, Callable[[Parameters], Optimizer]] = {
    "LBFGS": lambda _: LBFGS(nn.Linear(2, 2).parameters()),
    "a norm": OverNorm,
    "a bound": Clipped,
    "a number that grows": LargestSoFar,
    "inside": lambda parameters: Inside(parameters, OverNorm),
    "warm-up": lambda parameters: OverNorm(parameters, lr=0.0),
    "one parameter each": lambda parameters: OverNorm([group["params"][0] for group in parameters]),
}
APART: dict[str, Callable[[Parameters], Optimizer]] = {
    "AdamW": AdamW,
    "a class of AdamW": type("MyAdamW", (AdamW,), {}),
    "plain": Plain,
    "noisy": Noisy,
    "takes an argument": WithArgument,
    "inside": lambda parameters: Inside(parameters, SGD),
}


@pytest.mark.parametrize("name", [*TOGETHER])
def test_a_step_that_takes_something_from_all_parameters_is_seen(name: str) -> None:
    assert steps_together(TOGETHER[name](_lay_out()))


@pytest.mark.parametrize("name", [*APART])
def test_one_that_steps_each_parameter_by_itself_passes_and_nothing_of_it_changes(name: str) -> None:
    optimizer = APART[name](_lay_out())
    before = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    random, state = torch.get_rng_state(), {id(p): dict(value) for p, value in optimizer.state.items()}
    assert not steps_together(optimizer)
    after = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, after, strict=True))
    assert {id(p): dict(value) for p, value in optimizer.state.items()} == state
    assert torch.equal(torch.get_rng_state(), random)
    assert getattr(optimizer, "steps", 0) == 0


def test_a_collective_ends_the_trial() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert not steps_together(Exchanging(_lay_out()))
    finally:
        dist.destroy_process_group()
    assert not Exchanging.made
