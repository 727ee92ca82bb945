"""What a script does with the runtime that is not in its words is answered in two lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, default_collate

import hpcddp
from hpcddp.errors import RequestError

from .toy_loop import make_data, make_model, prepare_toy


def test_the_loader_and_the_runtime_say_what_a_script_asks_of_a_data_loader_and_a_group() -> None:
    with hpcddp.runtime(max_micro_batch=2) as rt:
        loader = prepare_toy(rt).loader
        assert (loader.batch_size, loader.num_workers, loader.collate_fn) == (6, 0, default_collate)
        assert (rt.rank, rt.world_size) == (0, 1)
    with hpcddp.runtime(6) as rt:
        assert rt.loader(make_data()).batch_size == 6


def test_a_loop_over_another_loader_than_the_first_says_that_the_first_is_the_training_data() -> None:
    model = make_model()
    test, train = (DataLoader(make_data(), batch_size=6) for _ in range(2))

    def run(model: nn.Module, train: Any) -> None:
        with hpcddp.runtime() as rt:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer, _, train = rt.prepare(model, optimizer, test, train)
            for _ in rt.epochs(1):
                for x, _ in train:
                    rt.backward(model(x).sum())

    with pytest.raises(RequestError, match=r"the loader that rt\.prepare returned for its first"):
        run(model, train)


def test_a_metric_that_is_no_number_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with hpcddp.runtime() as rt:
        toy = prepare_toy(rt)
        for _ in rt.epochs(1):
            for x, y in toy.loader:
                toy.step(rt, x, y)
            assert not rt.save_best(float("nan"))
    assert "warning: rt.save_best(value) got NaN on rank 0" in capsys.readouterr().err


class PutsBackward(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # of one gradient
        return put(grad)


def put(x: torch.Tensor) -> torch.Tensor:
    return x.clone().put_(torch.tensor([0, 1]), torch.ones(2, dtype=x.dtype))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda _rt, x: put(x),
        lambda rt, x: rt.backward(PutsBackward.apply(x).sum()),
    ],
)
def test_what_an_exact_run_cannot_compute_is_named_forward_and_backward(
    wrong: Callable[[Any, torch.Tensor], Any],
) -> None:
    def train() -> None:
        with hpcddp.runtime(exact=True, slices=2) as rt:
            toy = prepare_toy(rt)
            for batch in toy.loader:
                for x, _ in rt.micro_batches(batch):
                    wrong(rt, toy.model(x))

    with pytest.raises(RequestError, match="torch has no deterministic kernel for put_ on cpu, so exact mode"):
        train()
