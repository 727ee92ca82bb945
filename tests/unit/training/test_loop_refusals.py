"""What would train wrongly is refused where it happens in the loop."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import hpcddp
from hpcddp.errors import RequestError

from .toy_loop import CLASSES, deviation, make_data, make_model, weights_of

Body = Callable[..., None]


def no_backward(rt: Any, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    model(x)


def plain_backward(rt: Any, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()


def no_step(rt: Any, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    rt.backward(cross_entropy(model(x), y))


def two_steps(rt: Any, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    rt.backward(cross_entropy(model(x), y))
    optimizer.step()
    optimizer.step()


def never_zeroed(rt: Any, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    rt.backward(cross_entropy(model(x), y))
    optimizer.step()


def clipped_too_early(rt: Any, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    rt.backward(cross_entropy(model(x), y))
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()


def both_backwards(rt: Any, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    rt.backward(cross_entropy(model(x), y))
    cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def cleared_in_part(rt: Any, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    layers = list(model.children())
    for parameter in layers[-1 if rt.steps else 0].parameters():
        parameter.grad = None
    rt.backward(cross_entropy(model(x), y))
    optimizer.step()


def clipped_in_part(rt: Any, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    rt.backward(cross_entropy(model(x), y))
    layers = list(model.children())
    nn.utils.clip_grad_norm_(layers[rt.steps - 1].parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()


def zeroed_by_the_model(rt: Any, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    model.zero_grad()
    rt.backward(cross_entropy(model(x), y))
    optimizer.step()


def set_to_none(rt: Any, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    for parameter in model.parameters():
        parameter.grad = None
    rt.backward(cross_entropy(model(x), y))
    rt.step(optimizer)


def set_to_none_behind(rt: Any, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    rt.backward(cross_entropy(model(x), y))
    optimizer.step()
    model.zero_grad()


def set_to_zero(rt: Any, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    model.zero_grad(set_to_none=False)
    rt.backward(cross_entropy(model(x), y))
    optimizer.step()


def zeroed_before_the_step(rt: Any, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    rt.backward(cross_entropy(model(x), y))
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()


def dropped_before_the_step(rt: Any, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    rt.backward(cross_entropy(model(x), y))
    optimizer.zero_grad()
    optimizer.step()


def another_group(rt: Any, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    shift = nn.Parameter(torch.zeros(CLASSES, dtype=torch.float64))
    optimizer.add_param_group({"params": [shift]})
    rt.backward(cross_entropy(model(x) + shift, y))
    rt.step(optimizer)


def closure(rt: Any, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    def evaluate() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        rt.backward(loss)
        return loss

    optimizer.step(evaluate)


def turns_in_one_micro_batch(rt: Any, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        rt.backward(cross_entropy(model(x), y))
        optimizer.step()


def foreign_scaler(rt: Any, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    rt.backward(cross_entropy(model(x), y), scaler=torch.amp.GradScaler("cpu"))


SPLIT = {"max_micro_batch": 2}


@pytest.mark.parametrize(
    ("body", "options", "message"),
    [
        (no_backward, {}, "went by without rt.backward"),
        (plain_backward, {}, "without a new rt.backward"),
        (plain_backward, SPLIT, "without a new rt.backward"),
        (no_step, {}, "went by without optimizer.step"),
        (no_step, SPLIT, "went by without optimizer.step"),
        (two_steps, {}, "without a new rt.backward"),
        (two_steps, SPLIT, "without a new rt.backward"),
        (never_zeroed, {}, "the gradients of the step before"),
        (never_zeroed, SPLIT, "the gradients of the step before"),
        (cleared_in_part, {}, "the gradients of the step before"),
        (clipped_in_part, SPLIT, "changed between two micro batches"),
        (clipped_too_early, SPLIT, "changed between two micro batches"),
        (both_backwards, SPLIT, "changed between two micro batches"),
        (zeroed_by_the_model, SPLIT, "changed between two micro batches"),
        (set_to_none, SPLIT, "changed between two micro batches"),
        (set_to_none_behind, SPLIT, "changed between two micro batches"),
        (set_to_none_behind, {"exact": True, "slices": 4}, "changed between two micro batches"),
        (set_to_zero, SPLIT, "changed between two micro batches"),
        (zeroed_before_the_step, {}, "the gradients of rt.backward.loss. were cleared"),
        (dropped_before_the_step, {}, "the gradients of rt.backward.loss. were cleared"),
        (another_group, {}, "1 of the parameters of a SGD were in no prepared model at rt.prepare"),
        (closure, {}, "optimizer.step.closure. is not supported"),
        (closure, SPLIT, "optimizer.step.closure. is not supported"),
        (turns_in_one_micro_batch, SPLIT, "after optimizer.step.. in one micro batch"),
        (turns_in_one_micro_batch, {"exact": True, "slices": 1}, "an exact run takes gradients once"),
        (foreign_scaler, {}, "the gradient scaler was not prepared"),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value)[:12],
)
def test_what_would_train_wrongly_is_refused_where_it_happens(body: Body, options: Any, message: str) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def run() -> None:
        with hpcddp.runtime(**options) as rt:
            wrapped, _, loader = rt.prepare(model, optimizer, DataLoader(make_data(), batch_size=6))
            for _ in rt.epochs(2):
                for x, y in loader:
                    assert rt.steps < 2, "a mistake of two steps"
                    body(rt, wrapped, optimizer, x, y)

    with pytest.raises(RequestError, match=message):
        run()


def test_gradients_that_are_cleared_before_the_forward_pass_are_freed_by_then() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    freed = []
    with hpcddp.runtime() as rt:
        wrapped, optimizer, loader = rt.prepare(model, optimizer, DataLoader(make_data(), batch_size=6))
        before: list[weakref.ref[Tensor]] = []
        for _ in rt.epochs(1):
            for x, y in loader:
                model.zero_grad()
                freed.append([gradient() is None for gradient in before])
                rt.backward(cross_entropy(wrapped(x), y))
                optimizer.step()
                before = [weakref.ref(p.grad) for p in model.parameters() if p.grad is not None]
    assert freed == [[], *[[True] * 4] * 3]


def scaled_and_stepped_without(rt: Any, model: nn.Module, optimizer: Any, scaler: Any, loss: Tensor) -> None:
    rt.backward(loss, scaler=scaler)
    rt.step(optimizer, clip_norm=1.0)


def scaled_before_backward(rt: Any, model: nn.Module, optimizer: Any, scaler: Any, loss: Tensor) -> None:
    rt.backward(scaler.scale(loss))
    rt.step(optimizer, scaler=scaler)


def a_scaled_sum(rt: Any, model: nn.Module, optimizer: Any, scaler: Any, loss: Tensor) -> None:
    rt.backward(scaler.scale(loss) + scaler.scale(loss))
    rt.step(optimizer, scaler=scaler)


def unscaled_and_stepped_with(rt: Any, model: nn.Module, optimizer: Any, scaler: Any, loss: Tensor) -> None:
    rt.backward(loss)
    rt.step(optimizer, scaler=scaler)


def unscaled_and_clipped_with(rt: Any, model: nn.Module, optimizer: Any, scaler: Any, loss: Tensor) -> None:
    rt.backward(loss)
    rt.step(optimizer, scaler=scaler, clip_norm=1.0)


def stepped_with_a_foreign_scaler(rt: Any, model: nn.Module, optimizer: Any, scaler: Any, loss: Tensor) -> None:
    rt.backward(loss)
    rt.step(optimizer, scaler=torch.amp.GradScaler("cpu"))


def run_with_scaler(body: Body, *, enabled: bool = True, **options: Any) -> list[Tensor]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with hpcddp.runtime(**options) as rt:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=enabled)
        wrapped, _, scaler, loader = rt.prepare(model, optimizer, scaler, DataLoader(make_data(), batch_size=6))
        for _ in rt.epochs(1):
            for x, y in loader:
                body(rt, wrapped, optimizer, scaler, cross_entropy(wrapped(x), y))
    return weights_of(model)


@pytest.mark.parametrize("options", [{}, SPLIT], ids=str)
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (scaled_and_stepped_without, "which rt.backward.loss, scaler=scaler. has scaled"),
        (scaled_before_backward, "a loss that scaler.scale.loss. has scaled"),
        (a_scaled_sum, "no rt.backward.loss, scaler=scaler. before it"),
        (unscaled_and_stepped_with, "no rt.backward.loss, scaler=scaler. before it"),
        (unscaled_and_clipped_with, "no rt.backward.loss, scaler=scaler. before it"),
        (stepped_with_a_foreign_scaler, "the gradient scaler was not prepared"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_scaler_is_for_the_backward_pass_and_the_step_alike(body: Body, options: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        run_with_scaler(body, **options)


def unscaled_by_the_loop(rt: Any, model: nn.Module, optimizer: Any, scaler: Any, loss: Tensor) -> None:
    rt.backward(loss, scaler=scaler)
    scaler.unscale_(optimizer)
    optimizer.step()
    scaler.update()
    optimizer.zero_grad()


@pytest.mark.parametrize("options", [{}, SPLIT], ids=str)
def test_gradients_that_the_loop_has_unscaled_may_be_stepped_on_and_a_scaler_that_is_off_is_no_scaler(
    options: Any,
) -> None:
    def plain(rt: Any, model: nn.Module, optimizer: Any, scaler: Any, loss: Tensor) -> None:
        rt.backward(loss)
        rt.step(optimizer)

    expected = run_with_scaler(plain, **options)
    assert deviation(run_with_scaler(unscaled_by_the_loop, **options), expected) < 1e-12
    for body in (scaled_before_backward, unscaled_and_stepped_with):
        assert deviation(run_with_scaler(body, enabled=False, **options), expected) < 1e-12
