"""In one pass over a global batch each micro batch has a backward pass, or none has: no sample is lost unseen."""

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

from .toy_loop import make_data, make_model, weights_of

MODES: tuple[dict[str, Any], ...] = ({"max_micro_batch": 2}, {"exact": True, "slices": 3})
LOST = (
    r"1 of the 2 micro batches so far of this pass over the global batch had no rt.backward\(loss\): their samples"
    r" would count without a gradient\nhint: rt.backward\(loss\) in each micro batch; to leave the whole step out:"
    r" rt.backward\(loss\), then rt.skip_step\(\) at its last micro batch"
)


def train(body: Callable[..., None], **options: Any) -> list[Tensor]:
    """Global batches of 6 samples in 3 micro batches; `body` gets the number of each micro batch, over all epochs."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hpcddp.runtime(**options) as rt:
        net, optimizer, loader = rt.prepare(model, optimizer, DataLoader(make_data(), batch_size=6, drop_last=True))
        nth = 0
        for _ in rt.epochs(1):
            for x, y in loader:
                body(rt, net, optimizer, cross_entropy(net(x), y), nth)
                nth += 1
    return weights_of(model)


def passes_over(places: tuple[int, ...]) -> Callable[..., None]:
    def body(rt: Any, _net: nn.Module, optimizer: Any, loss: Tensor, nth: int) -> None:
        if nth in places:
            return
        rt.backward(loss)
        rt.step(optimizer)

    return body


@pytest.mark.parametrize("options", MODES, ids=str)
@pytest.mark.parametrize("places", [(0,), (1,), (4,)], ids=str)
def test_a_micro_batch_that_is_passed_over_among_others_is_refused(places: Any, options: Any) -> None:
    with pytest.raises(RequestError, match=LOST):
        train(passes_over(places), **options)


@pytest.mark.parametrize("options", MODES, ids=str)
def test_the_last_micro_batch_cannot_be_passed_over(options: Any) -> None:
    with pytest.raises(RequestError, match=LOST.replace("2 micro", "3 micro")):
        train(passes_over((2,)), **options)


def test_the_last_micro_batch_is_known_before_its_backward_pass() -> None:
    def asks(rt: Any, _net: nn.Module, optimizer: Any, loss: Tensor, nth: int) -> None:
        last = rt.is_last_micro_batch
        rt.backward(loss)
        if last:
            optimizer.step()
            optimizer.zero_grad()

    for options in MODES:
        for found, expected in zip(train(asks, **options), train(passes_over(()), **options), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("options", MODES, ids=str)
def test_a_loop_that_is_left_before_the_last_micro_batch_loses_none(options: Any) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hpcddp.runtime(**options) as rt:
        net, optimizer, loader = rt.prepare(model, optimizer, DataLoader(make_data(), batch_size=6, drop_last=True))
        for _ in rt.epochs(2):
            for nth, (x, y) in enumerate(loader):
                if nth == 4:
                    break
                rt.backward(cross_entropy(net(x), y))
                rt.step(optimizer)
        assert rt.steps == 2


def test_a_pass_that_only_looks_is_no_loss_and_one_that_passes_over_is_refused_in_each_pass() -> None:
    def run(lost: int | None) -> int:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with hpcddp.runtime(max_micro_batch=2) as rt:
            net, optimizer, loader = rt.prepare(model, optimizer, DataLoader(make_data(), batch_size=6, drop_last=True))
            for _ in rt.epochs(1):
                for step in loader.steps():
                    for x, _ in step:
                        net(x)
                    for nth, (x, y) in enumerate(step):
                        if nth != lost:
                            rt.backward(cross_entropy(net(x), y))
                    optimizer.step()
                    optimizer.zero_grad()
            return rt.steps

    assert run(None) == 3
    with pytest.raises(RequestError, match=LOST):
        run(0)
