"""A loop that is left inside a batch or its micro batches, and an exception in a step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

import hpcddp
from hpcddp.errors import RequestError

from .toy_loop import Toy, deviation, make_data, make_model, prepare_toy, weights_of

MODES: list[dict[str, Any]] = [{}, {"max_micro_batch": 2}, {"exact": True, "slices": 2}]


@pytest.mark.parametrize("options", MODES, ids=str)
def test_after_a_break_behind_a_step_schedulers_and_averages_act(options: Any) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler, average = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5), AveragedModel(model)
    with hpcddp.runtime(**options) as rt:
        net, *_, loader = rt.prepare(model, optimizer, scheduler, average, DataLoader(make_data(), batch_size=6))
        for _ in rt.epochs(3):
            for nth, batch in enumerate(loader):
                optimizer.zero_grad()
                rt.train_step(batch, lambda micro: cross_entropy(net(micro[0]), micro[1]))
                optimizer.step()
                if nth == 1:
                    break
            scheduler.step()
            average.update_parameters(net)
    assert (rt.steps, int(average.n_averaged), optimizer.param_groups[0]["lr"]) == (6, 3, 0.0125)


def looked_at(rt: Any, toy: Toy) -> None:
    next(iter(toy.loader))
    for _ in rt.epochs(1):
        next(iter(toy.loader))
        for batch in toy.loader:
            toy.step_in_parts(rt, batch)
        assert rt.steps == 4


def one_by_one(rt: Any, toy: Toy) -> None:
    for _ in rt.epochs(1):
        for _ in range(4):
            toy.step_in_parts(rt, next(iter(toy.loader)))


def left_before_any_backward_pass(rt: Any, toy: Toy) -> None:
    for _ in rt.epochs(2):
        for nth, batch in enumerate(toy.loader):
            if nth == 2:
                break
            toy.step_in_parts(rt, batch)


def left_in_the_first_micro_batch_before_its_backward_pass(rt: Any, toy: Toy) -> None:
    for _ in rt.epochs(1):
        for nth, batch in enumerate(toy.loader):
            if nth == 3:
                for _ in rt.micro_batches(batch):
                    break
                break
            toy.step_in_parts(rt, batch)


@pytest.mark.parametrize("options", MODES, ids=str)
@pytest.mark.parametrize(
    ("body", "steps"),
    [
        (looked_at, 4),
        (one_by_one, 4),
        (left_before_any_backward_pass, 4),
        (left_in_the_first_micro_batch_before_its_backward_pass, 3),
    ],
)
def test_a_batch_that_was_only_looked_at_makes_no_step(
    body: Callable[[Any, Toy], None], steps: int, options: Any
) -> None:
    with hpcddp.runtime(**options) as rt:
        body(rt, prepare_toy(rt))
    assert rt.steps == steps


def left_behind_a_backward_pass(rt: Any, toy: Toy) -> None:
    for _ in rt.epochs(2):
        for batch in toy.loader:
            for x, y in rt.micro_batches(batch):
                rt.backward(cross_entropy(toy.model(x), y))
                break
            break


def the_micro_batches_are_left_and_the_step_is_made(rt: Any, toy: Toy) -> None:
    for batch in toy.loader:
        for x, y in rt.micro_batches(batch):
            rt.backward(cross_entropy(toy.model(x), y))
            break
        toy.optimizer.step()


@pytest.mark.parametrize("options", MODES[1:], ids=str)
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (left_behind_a_backward_pass, r"of this batch had rt.backward\(loss\)"),
        (the_micro_batches_are_left_and_the_step_is_made, r"SGD.step\(\) came inside rt.micro_batches"),
    ],
)
def test_micro_batches_that_are_left_behind_a_backward_pass_are_refused(
    body: Callable[[Any, Toy], None], message: str, options: Any
) -> None:
    def run() -> None:
        with hpcddp.runtime(**options) as rt:
            body(rt, prepare_toy(rt))

    with pytest.raises(RequestError, match=message):
        run()


class Breaks(torch.optim.SGD):
    """Breaks in the middle of its step, once."""

    at = -1

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # gives nothing
        self.at -= 1
        first, *_ = self.param_groups[0]["params"]
        if self.at == -1:
            with torch.no_grad():
                first.mul_(0.0)
            raise KeyError("in a step")
        super().step(closure)


@pytest.mark.parametrize("options", MODES, ids=str)
def test_what_an_exception_left_in_the_middle_of_a_step_is_in_no_checkpoint(options: Any, tmp_path: Path) -> None:
    def train(at: int, *, catches: bool = False) -> list[Any]:
        model = make_model()
        optimizer = Breaks(model.parameters(), lr=0.1)
        optimizer.at = at
        with hpcddp.runtime(run_dir=str(tmp_path / str(at > 0 or at == -2)), save_every=2, **options) as rt:
            toy = Toy(*rt.prepare(model, optimizer, DataLoader(make_data(), batch_size=6)))
            try:
                for _ in rt.epochs(2):
                    for batch in toy.loader:
                        toy.step_in_parts(rt, batch)
            except KeyError:
                if not catches:
                    raise
        return weights_of(model)

    undisturbed = train(-1)
    folder = tmp_path / "True"
    with pytest.raises(KeyError):
        train(7)
    assert json.loads((folder / "state.json").read_text())["status"] == "failed"
    train(1, catches=True)
    assert json.loads((folder / "state.json").read_text())["status"] == "unfinished"
    assert deviation(train(-2), undisturbed) == 0
