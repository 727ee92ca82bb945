"""A step that is left out on purpose is said by rt.skip_step(); one that was forgotten is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import hpcddp
from hpcddp.errors import RequestError

Body = Callable[..., None]

BAD = 2  # the step whose gradients are infinite
MODES: tuple[dict[str, Any], ...] = ({}, {"max_micro_batch": 2}, {"exact": True, "slices": 3})


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(24, 4, generator=generator, dtype=torch.float64), torch.arange(24) % 3)


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(4, 3, dtype=torch.float64)


def reference(bad: int | None = BAD) -> list[Tensor]:
    """Plain torch, the step `bad` left out; the scheduler steps all the same."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.step()  # torch warns of a scheduler that steps before the optimizer
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    data = make_data()
    for step in range(4):
        rows = slice(6 * step, 6 * step + 6)
        optimizer.zero_grad()
        cross_entropy(model(data.tensors[0][rows]), data.tensors[1][rows]).backward()
        if step != bad:
            optimizer.step()
        scheduler.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def train(body: Body, folder: Path | None = None, bad: int = BAD, **options: Any) -> list[Tensor]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    loader = DataLoader(make_data(), batch_size=6)
    with hpcddp.runtime(run_dir=folder, **options) as rt:
        net, optimizer, scheduler, loader = rt.prepare(model, optimizer, scheduler, loader)
        for _ in rt.epochs(1):
            for x, y in loader:
                loss = cross_entropy(net(x), y) * (float("inf") if rt.steps == bad else 1.0)
                body(rt, net, optimizer, scheduler, loss)
        assert rt.steps == 4
    return [parameter.detach().clone() for parameter in model.parameters()]


def by_its_norm(rt: Any, model: nn.Module, optimizer: Any, scheduler: Any, loss: Tensor) -> None:
    rt.backward(loss)
    if rt.is_last_micro_batch:
        if nn.utils.clip_grad_norm_(model.parameters(), 1e9).isfinite():
            optimizer.step()
        else:
            rt.skip_step()
        scheduler.step()
    optimizer.zero_grad()


def in_each_micro_batch(rt: Any, model: nn.Module, optimizer: Any, scheduler: Any, loss: Tensor) -> None:
    """Harmless before the last one; nothing clears the gradients but the step and what stands in for it."""
    rt.backward(loss)
    if rt.steps == BAD:
        rt.skip_step(optimizer)
    else:
        optimizer.step()
        optimizer.zero_grad()
    scheduler.step()


def instead_of_one_call(rt: Any, model: nn.Module, optimizer: Any, scheduler: Any, loss: Tensor) -> None:
    optimizer.zero_grad()
    rt.backward(loss)
    if rt.steps == BAD:
        rt.skip_step()
        if rt.is_last_micro_batch:
            scheduler.step()
    else:
        rt.step(optimizer, scheduler=scheduler)


@pytest.mark.parametrize("options", MODES, ids=str)
@pytest.mark.parametrize("body", [by_its_norm, in_each_micro_batch, instead_of_one_call], ids=lambda b: b.__name__)
def test_a_step_that_is_skipped_counts_and_changes_no_weight(body: Body, options: dict[str, Any]) -> None:
    for found, expected in zip(train(body, **options), reference(), strict=True):
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)


def test_the_first_step_may_be_skipped_and_the_last_before_a_checkpoint(tmp_path: Path) -> None:
    for bad in (0, 3):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(by_its_norm, tmp_path / str(bad), bad)
        assert list((tmp_path / str(bad) / "checkpoints").glob("step-*4"))


def test_of_two_optimizers_one_may_be_skipped() -> None:
    stepped = []
    models = [nn.Linear(4, 3, dtype=torch.float64) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    with hpcddp.runtime() as rt:
        *nets, first, second, loader = rt.prepare(*models, *optimizers, DataLoader(make_data(), batch_size=6))
        for _ in rt.epochs(1):
            for x, y in loader:
                before = [model.weight.detach().clone() for model in models]
                rt.backward(cross_entropy(nets[0](x) + nets[1](x), y))
                skips, steps = (first, second) if rt.steps % 2 else (second, first)
                rt.skip_step(skips)
                rt.step(steps)
                stepped.append([not torch.equal(a, b.weight) for a, b in zip(before, models, strict=True)])
    assert stepped == [[True, False], [False, True]] * 2


def step_then_skip(rt: Any, model: nn.Module, optimizer: Any, scheduler: Any, loss: Tensor) -> None:
    rt.backward(loss)
    optimizer.step()
    rt.skip_step()


def skip_then_step(rt: Any, model: nn.Module, optimizer: Any, scheduler: Any, loss: Tensor) -> None:
    rt.backward(loss)
    rt.skip_step()
    optimizer.step()


def neither(rt: Any, model: nn.Module, optimizer: Any, scheduler: Any, loss: Tensor) -> None:
    rt.backward(loss)
    optimizer.zero_grad()


def accumulated_by_hand(rt: Any, model: nn.Module, optimizer: Any, scheduler: Any, loss: Tensor) -> None:
    rt.backward(loss / 2)
    if (rt.steps + 1) % 2 == 0:
        optimizer.step()
        optimizer.zero_grad()


def skip_of_another(rt: Any, model: nn.Module, optimizer: Any, scheduler: Any, loss: Tensor) -> None:
    rt.backward(loss)
    rt.skip_step(torch.optim.SGD(model.parameters(), lr=0.1))


def skip_before_backward(rt: Any, model: nn.Module, optimizer: Any, scheduler: Any, loss: Tensor) -> None:
    if rt.steps == BAD:
        rt.skip_step()
    else:
        rt.backward(loss)
        rt.step(optimizer)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            skip_before_backward,
            r"rt.skip_step\(\) came without rt.backward.*\nhint: rt.backward\(loss\) .* then rt.skip_step",
        ),
        (
            step_then_skip,
            r"rt.skip_step\(\) came after the SGD had stepped\nhint: if norm.isfinite\(\): optimizer.step",
        ),
        (skip_then_step, r"optimizer.step\(\) came after rt.skip_step\(\) in one global batch\nhint: if norm.isf"),
        (neither, r"went by without optimizer.step\(\)\nhint: .* To leave a step out: rt.skip_step\(\)"),
        (accumulated_by_hand, r"went by without optimizer.step\(\)\nhint: .* hpcddp.runtime\(global_batch=K \* 6\)"),
        (skip_of_another, "rt.skip_step was given a SGD that was not prepared"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
@pytest.mark.parametrize("options", MODES[:2], ids=str)
def test_what_is_no_clear_choice_is_refused(body: Body, message: str, options: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as error:
        train(body, **options)
    error.match(message)


def test_a_step_is_skipped_in_the_loop_only() -> None:
    model = make_model()
    with hpcddp.runtime() as rt:
        rt.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(make_data(), batch_size=6))
        with pytest.raises(RequestError, match="in no batch of the training loader"):
            rt.skip_step()
