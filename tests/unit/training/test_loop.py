"""The training loop: its own calls do what they did, once per global batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, default_collate

import hpcddp
from hpcddp.errors import RequestError

from .toy_loop import FEATURES, deviation, make_data, make_model, weights_of


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


def cases() -> list[object]:
    """Every body under all options; the short tests have all options for two of them, and none for the others."""
    short = (own_calls_zeroing_first, one_call)
    options: list[dict[str, Any]] = [{}, {"max_micro_batch": 2}, {"exact": "integer", "slices": 3}]
    return [
        pytest.param(
            body, some, id=f"{body.__name__}-{some}", marks=[pytest.mark.slow] if some and body not in short else []
        )
        for body in BODIES
        for some in options
    ]


@pytest.mark.parametrize(("body", "options"), cases())
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
