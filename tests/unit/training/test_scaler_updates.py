"""A gradient scaler makes its next scale once per backward pass that it scaled, after all steps on those gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import hpcddp
from hpcddp.errors import RequestError

from .toy_loop import deviation, make_data, make_model, weights_of

MODES: tuple[dict[str, Any], ...] = ({}, {"max_micro_batch": 2})
Body = Callable[[Any, Any, Any, Any, list[Tensor]], None]


def train(body: Body, *, init_scale: float = 4.0, dtype: torch.dtype = torch.float64, **options: Any) -> list[Tensor]:
    """Two models, each with an optimizer; the scale grows in each step."""
    models = [make_model().to(dtype) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=1)
    with hpcddp.runtime(**options) as rt:
        *made, scaler, loader = rt.prepare(
            *models, *optimizers, *schedulers, scaler, DataLoader(make_data(), batch_size=6, drop_last=True)
        )
        for _ in rt.epochs(1):
            for x, y in loader:
                losses = [cross_entropy(net(x.to(dtype)), y) for net in made[:2]]
                body(rt, made[2:4], made[4:], scaler, losses)
    return [weight for model in models for weight in weights_of(model)]


def together(rt: Any, optimizers: Any, _schedulers: Any, scaler: Any, losses: list[Tensor]) -> None:
    rt.backward(losses[0] + losses[1], scaler=scaler)
    rt.step(*optimizers, scaler=scaler)


def by_turns(rt: Any, optimizers: Any, _schedulers: Any, scaler: Any, losses: list[Tensor]) -> None:
    for optimizer, loss in zip(optimizers, losses, strict=True):
        rt.backward(loss, scaler=scaler)
        rt.step(optimizer, scaler=scaler)


def one_after_the_other(rt: Any, optimizers: Any, _schedulers: Any, scaler: Any, losses: list[Tensor]) -> None:
    rt.backward(losses[0] + losses[1], scaler=scaler)
    for optimizer in optimizers:
        rt.step(optimizer, scaler=scaler)


def updated_before_unscaling(rt: Any, optimizers: Any, _schedulers: Any, scaler: Any, losses: list[Tensor]) -> None:
    rt.backward(losses[0] + losses[1], scaler=scaler)
    scaler.step(optimizers[0])
    scaler.update()
    scaler.unscale_(optimizers[1])


def unscaled_before_the_update(rt: Any, optimizers: Any, _schedulers: Any, scaler: Any, losses: list[Tensor]) -> None:
    """torch would unscale those of the second optimizer twice."""
    rt.backward(losses[0] + losses[1], scaler=scaler)
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    for optimizer in optimizers:
        scaler.step(optimizer)
        scaler.update()


def never_updated(rt: Any, optimizers: Any, _schedulers: Any, scaler: Any, losses: list[Tensor]) -> None:
    rt.backward(losses[0] + losses[1], scaler=scaler)
    for optimizer in optimizers:
        scaler.step(optimizer)
        optimizer.zero_grad()


def skipped_without_update(rt: Any, optimizers: Any, _schedulers: Any, scaler: Any, losses: list[Tensor]) -> None:
    """In the step after it torch would take the gradients for unscaled."""
    rt.backward(losses[0] + losses[1], scaler=scaler)
    if rt.steps == 0:
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        rt.skip_step()
    else:
        rt.step(*optimizers, scaler=scaler)


OTHER_SCALE = (
    r"scaler.update\(\) came between rt.backward\(loss, scaler=scaler\) and the step of this SGD: .*\n"
    r"hint: rt.step\(oa, ob, scaler=scaler\)"
)
NO_UPDATE = (
    r"unscaled the gradients of this SGD before the last rt.backward.*no scaler.update\(\) since\n"
    r"hint: scaler.update\(\) in each step, also after rt.skip_step\(\)"
)


@pytest.mark.parametrize("options", MODES, ids=str)
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (one_after_the_other, OTHER_SCALE),
        (updated_before_unscaling, OTHER_SCALE),
        (unscaled_before_the_update, OTHER_SCALE),
        (never_updated, NO_UPDATE),
        (skipped_without_update, NO_UPDATE),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_gradients_are_divided_once_by_the_scale_that_they_were_multiplied_with(
    body: Body, message: str, options: dict[str, Any]
) -> None:
    with pytest.raises(RequestError, match=message):
        train(body, **options)


def test_two_optimizers_with_one_scaler_step_together_or_each_after_its_own_backward_pass() -> None:
    expected = train(together)
    assert deviation(train(together, max_micro_batch=2), expected) < 1e-12
    assert deviation(train(by_turns), expected) < 1e-12


def skipped_with_update(rt: Any, optimizers: Any, _schedulers: Any, scaler: Any, losses: list[Tensor]) -> None:
    rt.backward(losses[0] + losses[1], scaler=scaler)
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    if rt.steps == 0:
        rt.skip_step()
    else:
        for optimizer in optimizers:
            scaler.step(optimizer)
    scaler.update()
    for optimizer in optimizers:
        optimizer.zero_grad()


@pytest.mark.parametrize("options", MODES, ids=str)
def test_a_step_that_is_skipped_after_unscaling_needs_the_update_only(options: dict[str, Any]) -> None:
    train(skipped_with_update, **options)


def test_a_scheduler_steps_without_a_warning_where_the_scaler_leaves_the_first_step_out() -> None:
    def body(rt: Any, optimizers: Any, schedulers: Any, scaler: Any, losses: list[Tensor]) -> None:
        rt.backward(100 * (losses[0] + losses[1]), scaler=scaler)
        if rt.step(*optimizers, scheduler=schedulers[0], scaler=scaler):
            schedulers[1].step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(body, init_scale=2.0**127, dtype=torch.float32)
