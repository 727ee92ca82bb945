"""After the `with` body, however it ended, optimizers and schedulers act as they did before."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

import hpcddp

from .toy_loop import deviation, make_data, make_model, weights_of


@pytest.mark.parametrize("left_at", [1, 3], ids=str)  # the first micro batch of a step, or its last
def test_an_optimizer_of_a_body_that_was_left_trains_again_plainly_and_in_another_body(left_at: int) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    scaler, average = torch.amp.GradScaler("cpu", init_scale=2.0), AveragedModel(model)
    things = (optimizer, scheduler, scaler, average)
    kinds = [type(thing) for thing in things]

    def train(stop: int | None) -> int:
        with hpcddp.runtime(6, max_micro_batch=2) as rt:
            net, *_, loader = rt.prepare(model, *things, DataLoader(make_data(), batch_size=6, drop_last=True))
            for _ in rt.epochs(1):
                for nth, (x, y) in enumerate(loader, 1):
                    rt.backward(cross_entropy(net(x), y), scaler=scaler)
                    if nth == stop:
                        raise KeyboardInterrupt
                    rt.step(optimizer, scaler=scaler)
                    average.update_parameters(net)
        return rt.steps

    with contextlib.suppress(KeyboardInterrupt):
        train(left_at)
    assert [type(thing) for thing in things] == kinds
    assert all(parameter.grad is None for parameter in model.parameters())  # half a global batch makes no step
    before, averaged, rate = weights_of(model), int(average.n_averaged), optimizer.param_groups[0]["lr"]
    for x, y in DataLoader(make_data(), batch_size=6):
        optimizer.zero_grad()
        scaler.scale(cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
    scheduler.step()
    average.update_parameters(model)
    assert deviation(weights_of(model), before) > 1e-3
    assert (int(average.n_averaged), optimizer.param_groups[0]["lr"]) == (averaged + 1, rate / 2)
    before = weights_of(model)
    optimizer.zero_grad()
    assert train(None) == 3
    assert deviation(weights_of(model), before) > 1e-3


def test_a_scheduler_that_was_made_in_the_body_leaves_an_optimizer_that_steps() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with contextlib.suppress(KeyboardInterrupt), hpcddp.runtime(6, max_micro_batch=2) as rt:
        net, optimizer, loader = rt.prepare(model, optimizer, DataLoader(make_data(), batch_size=6))
        torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps `step` once more
        for x, y in loader:
            rt.backward(cross_entropy(net(x), y))
            raise KeyboardInterrupt
    before = weights_of(model)
    cross_entropy(model(x), y).backward()
    optimizer.step()
    assert deviation(weights_of(model), before) > 1e-3
