"""A step that is asked for in micro batches before the last, and not in the last, would never come: it is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

import hpcddp
from hpcddp.errors import RequestError

from .toy_loop import make_data, make_model


def train(what: str, *, by_steps: bool = False, **options: Any) -> None:
    """Asks for a step of `what` in every third batch of the loader, or of rt.steps."""
    model = make_model()
    optimizer, other = (torch.optim.SGD(half.parameters(), lr=0.1) for half in (model[0], model[2]))
    things = {
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "average": AveragedModel(model),
        "scaler": torch.amp.GradScaler("cpu", init_scale=2.0, enabled="scaler" in what),
    }
    with hpcddp.runtime(**options) as rt:
        batches = DataLoader(make_data(), batch_size=6, drop_last=True)
        net, *_, loader = rt.prepare(model, optimizer, other, *things.values(), batches)
        scheduler, average, scaler = things.values()
        for _ in rt.epochs(1):
            for nth, (x, y) in enumerate(loader):
                optimizer.zero_grad()
                other.zero_grad()
                rt.backward(cross_entropy(net(x), y), scaler=scaler)
                rt.step(optimizer, scaler=scaler)
                is_time = (rt.steps if by_steps else nth) % 3 == 0
                if is_time and what == "other":
                    other.step()
                elif is_time and what == "rt.step":
                    rt.step(other)
                elif is_time and "scheduler" in what:
                    scheduler.step()
                elif is_time and what == "average":
                    average.update_parameters(net)


@pytest.mark.parametrize(
    ("what", "call"),
    [("other", "SGD.step"), ("rt.step", "SGD.step"), ("scheduler", "StepLR.step"), ("average", "update_parameters")],
)
def test_a_step_under_a_count_of_micro_batches_is_refused_where_it_never_comes(what: str, call: str) -> None:
    with pytest.raises(RequestError, match=call + r"\(\) was called in some micro batches of a global batch and not"):
        train(what, max_micro_batch=2)


def test_a_step_under_a_count_of_steps_is_right_and_a_scheduler_may_wait_for_a_scaler() -> None:
    train("other", by_steps=True, max_micro_batch=2)
    train("scheduler", max_micro_batch=6)
    train("scheduler after the scaler", max_micro_batch=2)


class Halving:
    """A scheduler of one's own, whose state is all that it holds."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.count = optimizer, 0

    def step(self) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "optimizer"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


class Slotted:
    """One that holds no more than it has said."""

    __slots__ = ("count",)
    state_dict, load_state_dict = Halving.state_dict, Halving.load_state_dict

    def __init__(self, _optimizer: torch.optim.Optimizer) -> None:
        self.count = 0

    step = Halving.step


@pytest.mark.parametrize(("kind", "waits"), [(Halving, False), (Halving, True), (Slotted, False)])
def test_a_step_of_ones_own_in_each_micro_batch_is_said_once(
    kind: type[Halving], waits: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = kind(optimizer)
    with hpcddp.runtime(max_micro_batch=2) as rt:
        batches = DataLoader(make_data(), batch_size=6, drop_last=True)
        net, optimizer, own, loader = rt.prepare(model, optimizer, own, batches)
        for _ in rt.epochs(1):
            for x, y in loader:
                rt.backward(cross_entropy(net(x), y))
                rt.step(optimizer)
                if rt.is_last_micro_batch or not waits:
                    own.step()
            own.step()
    assert own.count == (4 if waits else 10)
    assert kind is Slotted or own.state_dict() == {"count": own.count}
    said = capsys.readouterr().err.count("Halving.step() is called in each micro batch")
    assert said == (kind is Halving and not waits)
