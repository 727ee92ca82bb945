"""Whether an optimizer may step without a gradient scaler is decided by its own gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import hpcddp
from hpcddp.errors import RequestError

MODES: tuple[dict[str, Any], ...] = ({}, {"max_micro_batch": 2}, {"exact": True, "slices": 3})


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(24, 4, generator=generator, dtype=torch.float64), torch.arange(24) % 3)


def train_two(order: str, first: str, second: str, **options: Any) -> list[torch.Tensor]:
    """Two models, each with a loss of its own; `first` and `second` say how each optimizer steps: with the scaler,
    plain, or plain after a scaled backward pass, in several ways. `order`: "12" or "21", of the backward passes."""
    torch.manual_seed(3)
    models = [nn.Linear(4, 3, dtype=torch.float64) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with hpcddp.runtime(**options) as rt:
        *made, scaler, loader = rt.prepare(*models, *optimizers, scaler, DataLoader(make_data(), batch_size=6))
        nets, optimizers = made[:2], made[2:]
        for _ in rt.epochs(1):
            for x, y in loader:
                for n in order:
                    how = (first, second)[int(n) - 1]
                    rt.backward(
                        cross_entropy(nets[int(n) - 1](x), y), scaler=None if how in ("plain", "needless") else scaler
                    )
                for optimizer, how in zip(optimizers, (first, second), strict=True):
                    if how in ("divided", "asked") and rt.is_last_micro_batch:
                        scale = scaler.get_scale()
                        for p in optimizer.param_groups[0]["params"] if how == "divided" else ():
                            p.grad.div_(scale)
                    if how == "clipped":
                        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.1)
                    if how in ("scaled", "needless"):
                        scaler.step(optimizer)
                    else:
                        optimizer.step()
                    optimizer.zero_grad()
                scaler.update()
    return [parameter.detach().clone() for model in models for parameter in model.parameters()]


@pytest.mark.parametrize(
    "options", [MODES[0], *(pytest.param(mode, marks=pytest.mark.slow) for mode in MODES[1:])], ids=str
)
def test_one_of_two_optimizers_may_step_without_the_scaler(options: dict[str, Any]) -> None:
    found = [
        train_two(order, *how, **options)
        for order in ("12", "21")
        for how in (("scaled", "scaled"), ("scaled", "plain"), ("plain", "scaled"), ("scaled", "divided"))
    ]
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("order", "how", "message"),
    [
        ("12", "forgotten", "which rt.backward.loss, scaler=scaler. has scaled"),
        ("21", "forgotten", "which rt.backward.loss, scaler=scaler. has scaled"),
        ("12", "clipped", "which rt.backward.loss, scaler=scaler. has scaled"),
        ("12", "asked", "which rt.backward.loss, scaler=scaler. has scaled"),
        ("12", "needless", "given to the step of a SGD, but there was no rt.backward.loss, scaler=scaler."),
        ("21", "needless", "given to the step of a SGD, but there was no rt.backward.loss, scaler=scaler."),
    ],
)
def test_what_one_of_two_optimizers_lacks_or_has_too_much_is_refused(order: str, how: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        train_two(order, "scaled", how)
