"""`loss.backward()` beside `rt.backward`: refused where an optimizer steps on what it brought, else left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import hpcddp
from hpcddp.errors import RequestError

from .toy_loop import deviation, make_data, make_model, weights_of

Body = Callable[..., None]


def train(body: Body, **options: Any) -> list[Tensor]:
    models = make_model(), make_model()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    with hpcddp.runtime(**options) as rt:
        *nets, _, _, loader = rt.prepare(*models, *optimizers, DataLoader(make_data(), batch_size=6))
        for _ in rt.epochs(1):
            for x, y in loader:
                body(rt, nets, optimizers, x, y)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
    return [weight for model in models for weight in weights_of(model)]


def on_the_other_model(rt: Any, nets: list[nn.Module], _optimizers: Any, x: Tensor, y: Tensor) -> None:
    rt.backward(cross_entropy(nets[0](x), y))
    cross_entropy(nets[1](x), y).backward()


def on_the_other_model_clipped(rt: Any, nets: list[nn.Module], _optimizers: Any, x: Tensor, y: Tensor) -> None:
    on_the_other_model(rt, nets, None, x, y)
    if rt.is_last_micro_batch:
        nn.utils.clip_grad_norm_(nets[1].parameters(), 0.1)


def before_it(rt: Any, nets: list[nn.Module], _optimizers: Any, x: Tensor, y: Tensor) -> None:
    torch.autograd.backward(0.5 * cross_entropy(nets[0](x), y))
    right(rt, nets, None, x, y)


def right(rt: Any, nets: list[nn.Module], _optimizers: Any, x: Tensor, y: Tensor) -> None:
    rt.backward(cross_entropy(nets[0](x), y) + cross_entropy(nets[1](x), y))


def by_zero_grad(nets: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()


def by_zeros(nets: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
    for net in nets:
        net.zero_grad(set_to_none=False)


def by_none(nets: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
    for net in nets:
        for parameter in net.parameters():
            parameter.grad = None


@pytest.mark.parametrize(
    ("body", "options"),
    [
        (on_the_other_model, {}),
        (on_the_other_model, {"max_micro_batch": 4}),
        (on_the_other_model, {"exact": True, "slices": 2}),
        (on_the_other_model_clipped, {}),
        (before_it, {}),
    ],
)
def test_an_optimizer_does_not_step_on_gradients_that_rt_backward_did_not_bring(body: Body, options: Any) -> None:
    with pytest.raises(RequestError, match=r"the SGD is to step on gradients that loss\.backward\(\) brought"):
        train(body, **options)


@pytest.mark.parametrize("clear", [by_zero_grad, by_zeros, by_none])
def test_a_backward_pass_that_only_looks_at_gradients_is_right(clear: Callable[..., None]) -> None:
    """As an attack on the input does (FGSM)."""

    def attacked(rt: Any, nets: list[nn.Module], optimizers: Any, x: Tensor, y: Tensor) -> None:
        x.requires_grad_()
        cross_entropy(nets[0](x), y).backward()
        assert x.grad is not None
        clear(nets, optimizers)
        right(rt, nets, None, x.detach(), y)

    assert deviation(train(attacked), train(right)) == 0
