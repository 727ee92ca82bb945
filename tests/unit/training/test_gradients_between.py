"""Gradients that are changed between two micro batches are found, also where their version does not show it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import hpcddp
from hpcddp.errors import RequestError

from .toy_loop import make_data, make_model


def clamp_the_data(gradient: Tensor) -> Tensor:
    gradient.data.clamp_(-0.02, 0.02)
    return gradient


def make_another(gradient: Tensor) -> Tensor:
    return gradient + 0.01


def leave(gradient: Tensor) -> Tensor:
    gradient.data.clamp_(-100, 100)
    return gradient


def train(change: Callable[[Tensor], Tensor], *, after: int = 0, **options: Any) -> int:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hpcddp.runtime(**options) as rt:
        net, optimizer, loader = rt.prepare(model, optimizer, DataLoader(make_data(), batch_size=6, drop_last=True))
        for _ in rt.epochs(1):
            for x, y in loader:
                optimizer.zero_grad()
                rt.backward(cross_entropy(net(x), y))
                for parameter in net.parameters():
                    if rt.steps >= after and parameter.grad is not None:
                        parameter.grad = change(parameter.grad)
                optimizer.step()
    return rt.steps


@pytest.mark.parametrize("options", [{"max_micro_batch": 2}, {"exact": True, "slices": 3}], ids=str)
@pytest.mark.parametrize(("change", "after"), [(clamp_the_data, 0), (make_another, 0), (make_another, 2)])
def test_a_change_by_data_in_the_first_steps_and_by_another_tensor_is_refused(
    change: Callable[[Tensor], Tensor], after: int, options: Any
) -> None:
    assert train(change, after=after) == 3  # of one micro batch, the gradient is whole
    with pytest.raises(RequestError, match="gradients were changed between two micro batches of one step"):
        train(change, after=after, **options)


def test_what_changes_no_number_is_no_change() -> None:
    assert train(leave, max_micro_batch=2) == 3
