"""The training loop: its own calls do what they did, once per global batch, and what would train wrongly is refused."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

import hpcddp
from hpcddp.errors import RequestError
from hpcddp.training.kinds import name_objects

RunRanks = Callable[..., Any]
SAMPLES, FEATURES, CLASSES = 20, 4, 3


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(SAMPLES, FEATURES, dtype=torch.float64, generator=generator)
    return TensorDataset(x, torch.randint(CLASSES, (SAMPLES,), generator=generator))


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


def weights_of(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def reference(epochs: int = 2, batch: int = 6, clip: float | None = None) -> list[Tensor]:
    """Plain torch, in order, each global batch in one piece."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    for _ in range(epochs):
        for x, y in DataLoader(make_data(), batch_size=batch):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            scheduler.step()
    return weights_of(model)


def own_calls_zeroing_first(rt: Any, model: Any, optimizer: Any, scheduler: Any, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    rt.backward(cross_entropy(model(x), y))
    optimizer.step()
    scheduler.step()


def own_calls_zeroing_last(rt: Any, model: Any, optimizer: Any, scheduler: Any, x: Tensor, y: Tensor) -> None:
    rt.backward(cross_entropy(model(x), y))
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


def the_models_zero_grad(rt: Any, model: Any, optimizer: Any, scheduler: Any, x: Tensor, y: Tensor) -> None:
    rt.backward(cross_entropy(model(x), y))
    if rt.is_last_micro_batch:
        optimizer.step()
        scheduler.step()
        model.zero_grad()


def one_call(rt: Any, model: Any, optimizer: Any, scheduler: Any, x: Tensor, y: Tensor) -> None:
    rt.backward(cross_entropy(model(x), y))
    rt.step(optimizer, scheduler=scheduler)


def two_losses(rt: Any, model: Any, optimizer: Any, scheduler: Any, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    rt.backward(0.25 * cross_entropy(model(x), y))
    rt.backward(0.75 * cross_entropy(model(x), y))
    optimizer.step()
    scheduler.step()


Body = Callable[..., None]
BODIES: list[Body] = [own_calls_zeroing_first, own_calls_zeroing_last, the_models_zero_grad, one_call, two_losses]


def train(body: Body, **options: Any) -> list[Tensor]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    with hpcddp.runtime(**options) as rt:
        prepared = rt.prepare(model, optimizer, scheduler, DataLoader(make_data(), batch_size=6))
        for _ in rt.epochs(2):
            for x, y in prepared[3]:
                body(rt, *prepared[:3], x, y)
        assert rt.steps == 8
    assert prepared[1] is optimizer
    assert prepared[2] is scheduler
    return weights_of(model)


def deviation(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("options", [{}, {"max_micro_batch": 2}, {"exact": "integer", "slices": 3}], ids=str)
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_the_loops_own_calls_give_the_weights_of_plain_torch(body: Body, options: dict[str, Any]) -> None:
    assert deviation(train(body, **options), reference()) < 1e-12


def test_clipping_is_that_of_the_global_batch() -> None:
    def clipped(rt: Any, model: Any, optimizer: Any, scheduler: Any, x: Tensor, y: Tensor) -> None:
        rt.backward(cross_entropy(model(x), y))
        rt.step(optimizer, scheduler=scheduler, clip_norm=0.1)

    for options in ({}, {"max_micro_batch": 2}, {"exact": True, "slices": 4}):
        assert deviation(train(clipped, **options), reference(clip=0.1)) < 1e-12


def test_a_scaler_acts_once_per_global_batch_and_leaves_a_step_with_infinite_gradients_out() -> None:
    def final(own: bool, overflow_at: int = -1) -> tuple[list[Tensor], float]:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        with hpcddp.runtime(max_micro_batch=2) as rt:
            model, optimizer, scaler, loader = rt.prepare(
                model, optimizer, scaler, DataLoader(make_data(), batch_size=6)
            )
            for _ in rt.epochs(1):
                for x, y in loader:
                    loss = cross_entropy(model(x), y) * (float("inf") if rt.steps == overflow_at else 1.0)
                    rt.backward(loss, scaler=scaler)
                    if own:
                        scaler.unscale_(optimizer)
                        scaler.step(optimizer)
                        scaler.update()
                        optimizer.zero_grad()
                    else:
                        rt.step(optimizer, scaler=scaler, clip_norm=1e9)
            assert rt.steps == 4
        return weights_of(model), scaler.get_scale()

    (own, scale), (called, same_scale) = final(True), final(False)
    assert deviation(own, called) < 1e-12
    assert scale == same_scale == 16.0  # four steps: it has grown twice
    assert final(True, overflow_at=3)[1] == 4.0 * 2 / 2


def test_a_layer_may_be_unfrozen_on_one_rank_and_not_in_an_exact_run() -> None:
    def final(rt: Any, model: Any) -> list[Tensor]:
        optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.05), DataLoader(make_data(), batch_size=6)
        net, _, loader = rt.prepare(model, optimizer, loader) if rt else (model, optimizer, loader)
        for epoch in rt.epochs(2) if rt else range(2):
            model[0].requires_grad_(epoch > 0)
            for x, y in loader:
                optimizer.zero_grad()
                loss = cross_entropy(net(x), y)
                rt.backward(loss) if rt else loss.backward()
                optimizer.step()
        return weights_of(model)

    def in_a_run(**options: Any) -> list[Tensor]:
        with hpcddp.runtime(**options) as rt:
            model = make_model()
            model[0].requires_grad_(False)
            return final(rt, model)

    assert deviation(in_a_run(max_micro_batch=2), final(None, make_model())) < 1e-12
    with pytest.raises(RequestError, match=r"0\.weight of Sequential requires a gradient, and did not at rt\.prepare"):
        in_a_run(exact=True, slices=3)


def test_train_step_takes_the_scaler_that_steps() -> None:
    def final(**scaling: Any) -> list[Tensor]:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with hpcddp.runtime(max_micro_batch=2) as rt:
            net, optimizer, _, loader = rt.prepare(
                model, optimizer, scaling.get("scaler", make_model()), DataLoader(make_data(), batch_size=6)
            )
            for _ in rt.epochs(1):
                for step in loader.steps():
                    rt.train_step(step, lambda batch: cross_entropy(net(batch[0]), batch[1]), **scaling)
                    rt.step(optimizer, **scaling)
            assert rt.steps == 4
        return weights_of(model)

    assert deviation(final(scaler=torch.amp.GradScaler("cpu", init_scale=4.0)), final()) < 1e-12


@pytest.mark.parametrize("options", [{}, {"max_micro_batch": 2}, {"exact": True, "slices": 3}], ids=str)
def test_a_prepared_average_of_the_weights_is_updated_once_per_global_batch(options: dict[str, Any]) -> None:
    def make() -> tuple[Any, Any, Any]:
        model = make_model()
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        return model, torch.optim.SGD(model.parameters(), lr=0.05), ema

    model, optimizer, ema = make()
    with hpcddp.runtime(**options) as rt:
        net, _, averaged, loader = rt.prepare(model, optimizer, ema, DataLoader(make_data(), batch_size=6))
        for _ in rt.epochs(1):
            for x, y in loader:
                optimizer.zero_grad()
                rt.backward(cross_entropy(net(x), y))
                optimizer.step()
                ema.update_parameters(rt.unwrap(net))
    assert averaged is ema
    assert isinstance(ema, AveragedModel)
    assert int(ema.n_averaged) == 4
    plain, optimizer, expected = make()
    for x, y in DataLoader(make_data(), batch_size=6):
        optimizer.zero_grad()
        cross_entropy(plain(x), y).backward()
        optimizer.step()
        expected.update_parameters(plain)
    assert deviation(weights_of(ema), weights_of(expected)) < 1e-12
    assert deviation(weights_of(copy.deepcopy(ema)), weights_of(expected)) < 1e-12


class Gan:
    """Two models whose losses use both."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        self.g, self.d = nn.Linear(FEATURES, FEATURES).double(), nn.Linear(FEATURES, 1).double()
        self.optimizer_g = torch.optim.SGD(self.g.parameters(), lr=0.1)
        self.optimizer_d = torch.optim.SGD(self.d.parameters(), lr=0.1)

    def loss_of_d(self, x: Tensor) -> Tensor:
        return (self.d(x) - self.d(self.g(x * 0.5).detach())).square().mean()

    def loss_of_g(self, x: Tensor) -> Tensor:
        return (1 - self.d(self.g(x * 0.5))).square().mean()

    def weights(self) -> list[Tensor]:
        return weights_of(self.g) + weights_of(self.d)


def reference_gan() -> list[Tensor]:
    gan = Gan()
    for x, _ in DataLoader(make_data(), batch_size=6):
        gan.optimizer_d.zero_grad()
        gan.loss_of_d(x).backward()
        gan.optimizer_d.step()
        gan.optimizer_g.zero_grad()
        gan.loss_of_g(x).backward()
        gan.optimizer_g.step()
    return gan.weights()


def test_two_optimizers_take_turns_in_the_plain_loop_where_nothing_is_accumulated() -> None:
    gan = Gan()
    with hpcddp.runtime() as rt:
        *_, loader = rt.prepare(gan.g, gan.d, gan.optimizer_g, gan.optimizer_d, DataLoader(make_data(), batch_size=6))
        for _ in rt.epochs(1):
            for x, _ in loader:
                gan.optimizer_d.zero_grad()
                rt.backward(gan.loss_of_d(x))
                gan.optimizer_d.step()
                gan.optimizer_g.zero_grad()
                rt.backward(gan.loss_of_g(x))
                gan.optimizer_g.step()
    assert deviation(gan.weights(), reference_gan()) < 1e-12


@pytest.mark.parametrize("options", [{}, {"max_micro_batch": 2}, {"exact": True, "slices": 4}], ids=str)
def test_two_optimizers_take_turns_over_the_micro_batches_of_a_step(options: dict[str, Any]) -> None:
    gan = Gan()
    with hpcddp.runtime(**options) as rt:
        *_, loader = rt.prepare(gan.g, gan.d, gan.optimizer_g, gan.optimizer_d, DataLoader(make_data(), batch_size=6))
        for _ in rt.epochs(1):
            for step in loader.steps():
                gan.optimizer_d.zero_grad()
                losses = rt.train_step(step, lambda batch: gan.loss_of_d(batch[0]))
                gan.optimizer_d.step()
                for x, _ in step:
                    gan.optimizer_g.zero_grad()
                    rt.backward(gan.loss_of_g(x))
                    gan.optimizer_g.step()
                assert len(losses) == len(step)
        assert rt.steps == 4
    assert deviation(gan.weights(), reference_gan()) < 1e-12


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


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.randn(8, 2))


def prepare_wrongly(what: str) -> None:
    data, model = make_data(), make_model()
    with hpcddp.runtime(global_batch=None if what in ("no batch", "one by one") else 4) as rt:
        if what == "weighted":
            rt.prepare(DataLoader(data, batch_size=4, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)))
        elif what == "replacement":
            rt.prepare(DataLoader(data, batch_size=4, sampler=RandomSampler(data, replacement=True)))
        elif what == "own batches":
            rt.prepare(DataLoader(data, batch_sampler=[[0, 1], [2, 3]]))
        elif what == "no batches":
            rt.prepare(DataLoader(data, batch_size=None))
        elif what == "cut stream":
            rt.prepare(DataLoader(Endless(), batch_size=4, drop_last=True))
        elif what == "too little":
            rt.prepare(DataLoader(TensorDataset(torch.zeros(3)), batch_size=4, drop_last=True))
        elif what == "data set":
            rt.prepare(data)
        elif what == "number":
            rt.prepare(7)
        elif what == "nothing":
            rt.prepare()
        elif what == "parallel":
            rt.prepare(nn.DataParallel(model))
        elif what == "foreign":
            rt.prepare(model, torch.optim.SGD(make_model().parameters(), lr=0.1))
        elif what == "twice":
            rt.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            rt.prepare(make_model())
        elif what == "one by one":
            rt.prepare(model)
        elif what == "no loader":
            rt.prepare(model)
            next(iter(rt.epochs(1)))
        elif what == "no batch":
            rt.loader(data)
        elif what == "workers twice":
            rt.loader(DataLoader(data, batch_size=4), num_workers=2)
        elif what == "two models":
            rt.prepare(model, make_model())
            rt.save_model("model.pt")
        elif what == "outside":
            rt.backward(torch.zeros((), requires_grad=True))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("weighted", "a sampler of its own, WeightedRandomSampler"),
        ("replacement", "a sampler of its own, RandomSampler"),
        ("own batches", "a batch_sampler of its own"),
        ("no batches", "batch_size=None"),
        ("cut stream", "drop_last does not go with a stream"),
        ("too little", "drop_last leaves none"),
        ("data set", "was given a data set"),
        ("number", "was given a int"),
        ("nothing", "was given nothing"),
        ("parallel", "in DataParallel already"),
        ("foreign", "4 of the parameters of a SGD belong to no prepared model"),
        ("twice", r"(?s)tracks its objects already.*rt.prepare\(model, optimizer, loader\): all of them in one call"),
        (
            "one by one",
            r"(?s)no global batch was given.*rt.prepare\(model, optimizer, loader\): all of them in one call",
        ),
        ("no loader", "no training loader yet"),
        ("no batch", "no global batch was given"),
        ("workers twice", "num_workers came with a DataLoader"),
        ("two models", "which of 2 models"),
        ("outside", "no batch was taken"),
    ],
)
def test_what_cannot_be_taken_over_is_refused_in_words(what: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        prepare_wrongly(what)


def test_the_dataloaders_batch_size_is_the_global_batch_and_the_largest_micro_batch() -> None:
    for options, expected in (({}, "6 = 1 rank x 6 x 1"), ({"global_batch": 12}, "12 = 1 rank x 6 x 2")):
        with hpcddp.runtime(**options) as rt:
            rt.prepare(DataLoader(make_data(), batch_size=6))
            assert str(rt.plan) == expected


def test_a_dataloader_is_taken_over_with_its_order_its_collate_function_and_its_end() -> None:
    def collate(samples: list[Any]) -> dict[str, Any]:
        return {"x": torch.stack([x for x, _ in samples]), "names": [f"{int(y)}" for _, y in samples]}

    model = make_model()
    with hpcddp.runtime() as rt:
        given = DataLoader(make_data(), batch_size=6, collate_fn=collate, drop_last=True)
        _, optimizer, loader = rt.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), given)
        seen = []
        for _ in rt.epochs(2):
            for batch in loader:
                seen.append(batch)
                rt.backward(model(batch["x"]).sum())
                rt.step(optimizer)
    assert len(seen) == 6  # 20 = 3 * 6 + 2, twice
    assert torch.equal(torch.cat([batch["x"] for batch in seen[:3]]), make_data().tensors[0][:18])
    assert seen[0]["names"] == [f"{int(y)}" for y in make_data().tensors[1][:6]]


def test_a_shuffled_dataloader_without_its_last_batch_leaves_other_samples_out_each_epoch() -> None:
    model = nn.Linear(1, 1)
    with hpcddp.runtime(seed=1) as rt:
        given = DataLoader(TensorDataset(torch.arange(10.0)[:, None]), batch_size=4, shuffle=True, drop_last=True)
        _, optimizer, loader = rt.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), given)
        seen: list[set[float]] = []
        for _ in rt.epochs(6):
            seen.append(set())
            for (x,) in loader:
                seen[-1] |= set(x.flatten().tolist())
                rt.backward(model(x).sum())
                rt.step(optimizer)
    assert {len(epoch) for epoch in seen} == {8}
    assert set.union(*seen) == set(range(10))


def test_a_loop_that_is_left_in_the_middle_of_a_global_batch_leaves_no_gradient_behind() -> None:
    model = make_model()
    with hpcddp.runtime(max_micro_batch=2) as rt:
        _, optimizer, loader = rt.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(make_data(), batch_size=6)
        )
        for epoch in rt.epochs(2):
            assert all(parameter.grad is None for parameter in model.parameters())
            for n, (x, y) in enumerate(loader):
                rt.backward(cross_entropy(model(x), y))
                rt.step(optimizer)
                if epoch == 0 and n == 3:
                    break
        assert rt.steps == 1 + 4


def test_a_loop_that_is_left_after_a_step_counts_it() -> None:
    model = make_model()
    with hpcddp.runtime() as rt:
        _, optimizer, loader = rt.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(make_data(), batch_size=6)
        )
        for _ in rt.epochs(1):
            for x, y in loader:
                rt.backward(cross_entropy(model(x), y))
                rt.step(optimizer)
                break
        assert rt.steps == 1


@pytest.mark.parametrize(("how", "status"), [("finish_early", "finished"), ("stop", "unfinished")])
def test_what_follows_the_loop_runs_if_the_run_is_finished(tmp_path: Path, how: str, status: str) -> None:
    model, after = make_model(), []
    with hpcddp.runtime(run_dir=str(tmp_path / "run")) as rt:
        _, optimizer, loader = rt.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(make_data(), batch_size=6)
        )
        for epoch in rt.epochs(3):
            for x, y in loader:
                rt.backward(cross_entropy(model(x), y))
                rt.step(optimizer)
                rt.log(doubled=2 * rt.steps)
                if rt.steps == 1:
                    getattr(rt, how)("good enough")
            after.append(epoch)
        rt.save_model(tmp_path / "weights" / "model.pt")
    [state] = (tmp_path / "run").glob("state.json")
    found = json.loads(state.read_text())
    assert (found["status"], found["reason"], found["step"]) == (status, "good enough", 2)
    [metrics] = (tmp_path / "run").glob("attempts/*/metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["doubled"] for line in lines if line["kind"] == "log"] == [0.0, 2.0]
    if how == "stop":
        assert after == []
        assert rt.stopping
        assert not (tmp_path / "weights").exists()
        return
    assert after == [0]
    plain = make_model()
    plain.load_state_dict(torch.load(tmp_path / "weights" / "model.pt", weights_only=True))
    assert deviation(weights_of(plain), weights_of(model)) == 0


def lose_the_weights_in_step_4(run_dir: str, stop: str | None) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hpcddp.runtime(10, run_dir=run_dir, save_every=3, keep=1) as rt:
        _, optimizer, loader = rt.prepare(model, optimizer, DataLoader(make_data()))
        for _ in rt.epochs(2):
            for x, y in loader:
                optimizer.zero_grad()
                rt.backward(cross_entropy(model(x), y) * (torch.nan if rt.steps == 3 else 1.0))
                if rt.steps == 3 and stop:
                    rt.stop(stop)
                optimizer.step()


@pytest.mark.parametrize("stop", [None, "the time is over"])
def test_weights_that_are_no_numbers_do_not_take_the_place_of_a_good_checkpoint(
    tmp_path: Path, stop: str | None
) -> None:
    with pytest.raises(
        RequestError, match=r"after step 4 the weights are no numbers any more: 0\.weight of Sequential"
    ):
        lose_the_weights_in_step_4(str(tmp_path), stop)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]
    assert json.loads((tmp_path / "state.json").read_text())["status"] == "failed"


def test_a_run_that_is_stopped_between_two_epochs_leaves_the_body_before_the_next_one() -> None:
    model = make_model()
    with hpcddp.runtime() as rt:
        _, optimizer, loader = rt.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(make_data(), batch_size=6)
        )
        for _ in rt.epochs(3):
            for x, y in loader:
                rt.backward(cross_entropy(model(x), y))
                rt.step(optimizer)
            rt.stop("enough for now")
        pytest.fail("this is not reached")
    assert rt.steps == 4


def test_objects_are_named_by_kind_and_order() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    things = [model, optimizer, make_model(), scheduler, torch.amp.GradScaler("cpu")]
    assert list(name_objects(things)) == ["model", "optimizer", "model_2", "scheduler", "scaler"]


@dataclasses.dataclass
class Words:
    ids: Tensor
    text: str


def test_a_batch_may_be_a_dataclass() -> None:
    from hpcddp.training.data.move import move

    moved = move(Words(torch.ones(2), "two"), torch.device("meta"))
    assert moved.ids.is_meta
    assert moved.text == "two"


def test_numbers_rows_and_objects_of_all_ranks(run_ranks: RunRanks, loop_bodies: ModuleType, tmp_path: Path) -> None:
    run_ranks("loop_bodies:meet_in_numbers", 3, str(tmp_path)).check()
    for rank in range(3):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found == {
            "int": 6,
            "float": 1.5,
            "numpy": [3, 1.5],
            "mixed": [1.0, 1.0],
            "small": [300, 300, 300],
            "truth": [3, 2],
            "complex": "3j",
            "vector": [3.0, 6.0],
            "rows": [[0.0], [1.0], [1.0], [2.0], [2.0], [2.0]],
            "kinds": [[0, 1, 0], [False, True, False]],
            "nothing": [0, 2],
            "told": "rank 0",
            "evaluated": list(range(7)),
            "batches": 2,
        }


def test_models_that_are_not_trained_start_alike_on_every_rank(
    run_ranks: RunRanks, loop_bodies: ModuleType, tmp_path: Path
) -> None:
    run_ranks("loop_bodies:prepare_models_that_are_not_trained", 2, str(tmp_path)).check()
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert found[0] == found[1]
    assert found[0]["teacher.mask"] == "[True, False]"
    assert found[0]["same"] == "True"


@pytest.mark.parametrize("rows", [[1, 2], 7, numpy.zeros(2)], ids=str)
def test_what_is_no_tensor_has_no_rows_to_gather(rows: Any) -> None:
    with hpcddp.runtime(4) as rt, pytest.raises(RequestError, match=r"has no rows to gather\nhint: rt\.gather"):
        rt.gather(rows)


@pytest.mark.parametrize("own_collate", [True, False], ids=["a collate function that draws", "torch's"])
def test_what_is_drawn_outside_of_the_loops_body_does_not_depend_on_what_was_drawn_in_it(own_collate: bool) -> None:
    def draw(in_the_body: int) -> list[float]:
        drawn = []

        def collate(samples: list[Any]) -> Any:
            drawn.append(float(torch.rand(1)))
            return default_collate(samples)

        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with hpcddp.runtime(seed=1) as rt:
            loader = DataLoader(make_data(), 6, collate_fn=collate if own_collate else None)
            model, optimizer, loader = rt.prepare(model, optimizer, loader)
            for epoch in rt.epochs(2):
                for nth, (x, y) in enumerate(loader):
                    torch.rand(in_the_body)
                    optimizer.zero_grad()
                    rt.backward(cross_entropy(model(x), y))
                    optimizer.step()
                    if epoch == 1 and nth == 1:
                        break
                if epoch == 0:
                    drawn.append(float(torch.rand(1)))
            drawn.append(float(torch.rand(1)))
        return drawn

    assert draw(1) == draw(5)
