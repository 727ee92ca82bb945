"""Loops that a split of the model over two ranks would get wrong without an error, and some that look alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import hpcddp
from hpcddp.errors import RequestError

SAMPLES, FEATURES = 8, 3


def refuse_all(argument: dict[str, Any]) -> None:
    """Each case in the same processes; every rank writes what it was told, and nothing where the loop ended."""
    told: dict[str, str] = {}
    with hpcddp.init() as group:
        for case in argument["cases"]:
            try:
                CASES[case](group)
                told[case] = ""
            except RequestError as error:
                told[case] = f"{error.message} | {error.hint}"
    Path(argument["folder"], f"{group.rank}.json").write_text(json.dumps(told))


class Choosing(nn.Module):
    """One of two layers of equal size, by the batch: rank 0's samples are negative, rank 1's are positive."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        self.first, self.second, self.never = (nn.Linear(FEATURES, FEATURES) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        other = bool(x.mean() > 0) and self.case != "alike"
        chosen, left = (self.second, self.first) if other else (self.first, self.second)
        return chosen(x) + 0 * left(x) if self.case == "passed" else chosen(x)


def _choose(case: str, parallel: Any) -> Callable[[Any], None]:
    def train(group: Any) -> None:
        data = TensorDataset(torch.linspace(-1, 1, SAMPLES)[:, None].expand(-1, FEATURES).clone())
        with hpcddp.runtime(SAMPLES, parallel=parallel, group=group) as rt:
            model = Choosing(case)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer, loader = rt.prepare(model, optimizer, DataLoader(data, SAMPLES))
            for _ in rt.epochs(2):
                for (x,) in loader:
                    optimizer.zero_grad()
                    rt.backward(model(x).square().mean())
                    optimizer.step()

    return train


class Halves(nn.Module):
    """Three layers, the first two of which tensor ranks divide."""

    tensor_plan: ClassVar = {"first": "colwise", "second": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        sizes = (FEATURES, 4, FEATURES, FEATURES)
        self.first, self.second, self.third = (nn.Linear(*sizes[nth : nth + 2]) for nth in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(torch.tanh(self.first(x))))


def _whole(number: Any) -> Tensor:
    return number.full_tensor() if hasattr(number, "full_tensor") else number


def _penalty(model: nn.Module) -> Tensor:
    return 0.01 * sum(_whole(p.square().sum()) for p in model.parameters())


def _run_halves(parallel: Any) -> Callable[[Any], None]:
    """Whose norms are those of clip_grad_norm_."""

    def train(group: Any) -> None:
        torch.manual_seed(2)
        data = TensorDataset(torch.randn(SAMPLES, FEATURES, dtype=torch.float64))
        with hpcddp.runtime(SAMPLES, parallel=parallel, group=group, max_micro_batch=4) as rt:
            model = Halves().double()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer, loader = rt.prepare(model, optimizer, DataLoader(data, SAMPLES))
            for batch in loader:
                optimizer.zero_grad()
                rt.train_step(batch, lambda micro: model(micro[0]).square().mean() + _penalty(model))
                norm = get_total_norm([p.grad for p in model.parameters()], foreach=False)
                clip_grads_with_norm_(model.parameters(), norm / 2, norm)
                clipped = _whole(nn.utils.clip_grad_norm_(model.parameters(), 1e9))
                assert float(clipped) == pytest.approx(float(_whole(norm)) / 2, rel=1e-3)
                optimizer.step()
            weights = [_whole(p.detach()) for p in model.parameters()]
        WEIGHTS.append(torch.cat([tensor.flatten() for tensor in weights]))
        assert float((WEIGHTS[-1] - WEIGHTS[0]).abs().max()) < 1e-12

    return train


def _use_adagrad(parallel: Any) -> Callable[[Any], None]:
    """It has its state before its first step."""

    def train(group: Any) -> None:
        torch.manual_seed(2)
        data = TensorDataset(torch.randn(3 * SAMPLES, FEATURES, dtype=torch.float64))
        with hpcddp.runtime(SAMPLES, parallel=parallel, group=group) as rt:
            model = rt.wrap(Halves().double())
            optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.3)
            model, optimizer, loader = rt.prepare(model, optimizer, DataLoader(data, SAMPLES))
            for batch in loader:
                optimizer.zero_grad()
                rt.train_step(batch, lambda micro: model(micro[0]).square().mean())
                optimizer.step()
            weights = {name: _whole(p.detach()) for name, p in rt.unwrap(model).named_parameters()}
        ADAGRAD.update({} if ADAGRAD else weights)
        assert weights
        assert all(float((weights[name] - ADAGRAD[name]).abs().max()) < 1e-12 for name in weights)

    return train


def _average(*, wraps: bool) -> Callable[[Any], None]:
    def train(group: Any) -> None:
        data = DataLoader(TensorDataset(torch.ones(SAMPLES, FEATURES)), batch_size=4)
        model = nn.Linear(FEATURES, 3)
        with hpcddp.runtime(group=group, parallel="fsdp") as rt:
            average = rt.wrap(AveragedModel(model)) if wraps else AveragedModel(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer, loader, average = rt.prepare(model, optimizer, data, average)
            for (x,) in loader:
                rt.backward(model(x).mean())
                optimizer.step()
                average.update_parameters(model)

    return train


ADAGRAD: dict[str, Tensor] = {}  # the weights of the first case
WEIGHTS: list[Tensor] = []  # of the cases so far that end with the same ones

CASES: dict[str, Callable[[Any], None]] = {
    "by batch, fsdp": _choose("by batch", "fsdp"),
    "by batch, copies": _choose("by batch", {"data": 2, "shard": 1}),
    "unused on all": _choose("alike", "fsdp"),
    "passed through": _choose("passed", "fsdp"),
    **{
        f"whole squares, {name}": _run_halves(parallel)
        for name, parallel in (("ddp", "ddp"), ("tensor", {"tensor": 2}), ("fsdp", "fsdp"))
    },
    **{
        f"Adagrad, {name}": _use_adagrad(parallel)
        for name, parallel in (("ddp", "ddp"), ("fsdp", "fsdp"), ("tensor", {"tensor": 2}))
    },
    "average, fsdp": _average(wraps=False),
    "wrapped average, fsdp": _average(wraps=True),
}
