"""The training loop: one batch is one step, and torch's own calls mean what they say."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, default_collate

import hpcddp
from hpcddp.errors import RequestError

from .toy_loop import SAMPLES, deviation, make_data, make_model, prepare_toy, weights_of

MODES: list[dict[str, Any]] = [{}, {"max_micro_batch": 2}, {"exact": True, "slices": 4}]


def reference(epochs: int = 2, batch: int = 6) -> list[Tensor]:
    """Plain torch, in order, each global batch in one piece."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    for _ in range(epochs):
        for x, y in DataLoader(make_data(), batch_size=batch):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()
    return weights_of(model)


def zeroed_first(rt: Any, model: Any, optimizer: Any, batch: Any) -> None:
    optimizer.zero_grad()
    for x, y in rt.micro_batches(batch):
        rt.backward(cross_entropy(model(x), y))
    optimizer.step()


def zeroed_last_by_the_model(rt: Any, model: Any, optimizer: Any, batch: Any) -> None:
    for x, y in rt.micro_batches(batch):
        rt.backward(cross_entropy(model(x), y))
    optimizer.step()
    model.zero_grad()


def train_step(rt: Any, model: Any, optimizer: Any, batch: Any) -> None:
    optimizer.zero_grad()
    losses = rt.train_step(batch, lambda micro: cross_entropy(model(micro[0]), micro[1]))
    assert losses.ndim == 1
    assert not losses.requires_grad
    optimizer.step()


@pytest.mark.parametrize("options", MODES, ids=str)
@pytest.mark.parametrize("body", [zeroed_first, zeroed_last_by_the_model, train_step])
def test_the_loops_own_calls_give_the_weights_of_plain_torch(body: Callable[..., None], options: Any) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    with hpcddp.runtime(**options) as rt:
        prepared = rt.prepare(model, optimizer, scheduler, DataLoader(make_data(), batch_size=6))
        assert len(prepared[3]) == 4
        for _ in rt.epochs(2):
            for batch in prepared[3]:
                body(rt, prepared[0], optimizer, batch)
                scheduler.step()
        assert rt.steps == 8
    assert prepared[1] is optimizer
    assert prepared[2] is scheduler
    assert deviation(weights_of(model), reference()) < 1e-12


def test_no_method_of_torchs_objects_is_replaced() -> None:
    """Neither on an object nor on its class, and the hooks for steps go with the run."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler, average = torch.amp.GradScaler("cpu", enabled=False), AveragedModel(model)
    objects = (optimizer, scheduler, scaler, average)

    def list_methods() -> list[Any]:
        of = [(vars(type(thing)), vars(thing)) for thing in objects]
        return [{name: value for name, value in some.items() if callable(value)} for both in of for some in both]

    before = list_methods()
    with hpcddp.runtime() as rt:
        _, *prepared, loader = rt.prepare(model, *objects, DataLoader(make_data(), batch_size=6))
        assert all(new is old for new, old in zip(prepared, objects, strict=True))
        for batch in loader:
            zeroed_first(rt, model, optimizer, batch)
            assert list_methods() == before
    optimizer.step()  # outside of the run: no check of it


@pytest.mark.parametrize(("options", "sizes"), [(MODES[1], [[2, 2, 2]] * 3 + [[2]]), (MODES[0], [[6]] * 3 + [[2]])])
def test_a_rank_has_its_share_in_micro_batches_of_at_most_the_largest(options: Any, sizes: list[list[int]]) -> None:
    with hpcddp.runtime(**options) as rt:
        toy, seen, counted = prepare_toy(rt), [], []
        for batch in toy.loader:
            seen.append([])
            for micro in rt.micro_batches(batch):
                seen[-1].append(rt.samples)
                assert (micro is batch) is (options == {})
                assert len(micro[0]) == rt.samples
                rt.backward(cross_entropy(toy.model(micro[0]), micro[1]))
            counted.append(rt.samples)
            toy.optimizer.step()
            toy.optimizer.zero_grad()
    assert seen == sizes
    assert counted == [sum(one) for one in sizes]


def test_a_layer_may_be_unfrozen_on_one_rank_and_not_in_an_exact_run() -> None:
    def final(rt: Any, model: Any) -> list[Tensor]:
        optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.05), DataLoader(make_data(), batch_size=6)
        net, _, loader = rt.prepare(model, optimizer, loader) if rt else (model, optimizer, loader)
        for epoch in rt.epochs(2) if rt else range(2):
            model[0].requires_grad_(epoch > 0)
            for batch in loader:
                optimizer.zero_grad()
                for x, y in rt.micro_batches(batch) if rt else [batch]:
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


@pytest.mark.parametrize("options", MODES, ids=str)
def test_the_mean_over_the_global_batch_is_that_of_all_its_samples(options: Any) -> None:
    with hpcddp.runtime(**options) as rt:
        toy = prepare_toy(rt)
        x, y = make_data().tensors
        for nth, batch in enumerate(toy.loader):
            whole = slice(6 * nth, min(6 * nth + 6, SAMPLES))
            expected = float(cross_entropy(toy.model(x[whole]), y[whole]).detach())
            losses = rt.train_step(batch, lambda micro: cross_entropy(toy.model(micro[0]), micro[1]))
            assert rt.mean(losses) == pytest.approx(expected, abs=1e-12)
            assert rt.mean(2.5) == pytest.approx(2.5, abs=1e-12)
            toy.optimizer.step()
            toy.optimizer.zero_grad()


def test_a_mean_in_micro_batches_of_two_loaders_says_of_which_batch() -> None:
    model = make_model()
    with hpcddp.runtime(max_micro_batch=2) as rt:
        data = [DataLoader(make_data(), size, shuffle=True) for size in (6, 4)]
        model, optimizer, first, second = rt.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), *data)
        for batches in itertools.islice(zip(first, second, strict=False), 1):
            for batch, sizes in zip(batches, ([2, 2, 2], [2, 2]), strict=True):
                rt.train_step(batch, lambda micro: cross_entropy(model(micro[0]), micro[1]))
                numbers = torch.arange(float(len(sizes)))
                assert rt.mean(numbers, of=batch) == pytest.approx(float(numbers.mean()))
            for of in (None, batches):
                with pytest.raises(RequestError, match="of= is no batch of this step"):
                    rt.mean(1.0, of=of)
            optimizer.step()


def test_gradients_that_are_cleared_before_the_forward_pass_are_freed_by_then() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    freed = []
    with hpcddp.runtime() as rt:
        wrapped, optimizer, loader = rt.prepare(model, optimizer, DataLoader(make_data(), batch_size=6))
        before: list[weakref.ref[Tensor]] = []
        for x, y in loader:
            model.zero_grad()
            freed.append([gradient() is None for gradient in before])
            rt.backward(cross_entropy(wrapped(x), y))
            optimizer.step()
            before = [weakref.ref(p.grad) for p in model.parameters() if p.grad is not None]
    assert freed == [[], *[[True] * 4] * 3]


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
