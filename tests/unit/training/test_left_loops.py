"""A loop that is left inside a global batch: what follows is outside of it, and what is lost is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

import hpcddp
from hpcddp.errors import RequestError

from .toy_loop import Toy, make_data, make_model, prepare_toy


@pytest.mark.parametrize("stop", [3, 5])
def test_after_a_break_in_any_micro_batch_schedulers_and_averages_act(
    stop: int, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler, average = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5), AveragedModel(model)
    with hpcddp.runtime(max_micro_batch=2) as rt:
        net, *_, loader = rt.prepare(model, optimizer, scheduler, average, DataLoader(make_data(), batch_size=6))
        for _ in rt.epochs(3):
            for nth, (x, y) in enumerate(loader):
                if nth == stop:
                    break
                optimizer.zero_grad()
                rt.backward(cross_entropy(net(x), y))
                optimizer.step()
            scheduler.step()
            average.update_parameters(net)
    assert (rt.steps, int(average.n_averaged), optimizer.param_groups[0]["lr"]) == (3 * (stop // 3), 3, 0.0125)
    assert capsys.readouterr().err.count("what rt.backward(loss) brought is dropped") == (stop % 3 > 0)


def first_of_each_epoch(rt: Any, toy: Toy) -> None:
    for _ in rt.epochs(3):
        for x, y in toy.loader:
            toy.step(rt, x, y)
            break


def first_of_one_epoch(rt: Any, toy: Toy) -> None:
    for _ in rt.epochs(1):
        for x, y in toy.loader:
            toy.step(rt, x, y)
            break


def first_again_and_again(rt: Any, toy: Toy) -> None:
    for _ in rt.epochs(1):
        for _ in range(4):
            toy.step(rt, *next(iter(toy.loader)))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (first_of_each_epoch, "left two global batches in a row before their last micro batch"),
        (first_again_and_again, "left two global batches in a row before their last micro batch"),
        (first_of_one_epoch, "nothing was trained: the loop left its only global batch"),
    ],
)
def test_backward_passes_that_are_all_dropped_are_refused(body: Callable[[Any, Toy], None], message: str) -> None:
    def run(**options: Any) -> int:
        with hpcddp.runtime(**options) as rt:
            body(rt, prepare_toy(rt))
        return rt.steps

    assert run() > 0
    with pytest.raises(RequestError, match=message):
        run(max_micro_batch=2)
