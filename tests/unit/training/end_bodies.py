"""What the ranks of the tests of sums and of the end of a run do, each with a runtime of its own in one group."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import hpcddp
from hpcddp.errors import HpcddpError


def _train(open_: Callable[[], Any], after: Callable[[Any, nn.Module], object]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    data = TensorDataset(torch.randn(8, 4), torch.arange(8) % 3)
    with open_() as rt:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = rt.prepare(model, optimizer, DataLoader(data, batch_size=4))
        for _ in rt.epochs(1):
            for x, y in loader:
                optimizer.zero_grad()
                rt.backward(cross_entropy(model(x), y))
                optimizer.step()
        after(rt, rt.unwrap(model))


def _scale(rt: Any, model: nn.Module) -> None:
    if rt.is_main:
        model[0].weight.data.mul_(0.9)


def _export(rt: Any, model: nn.Module) -> None:
    if rt.is_main:
        model.half()


def _cut(rt: Any, model: nn.Module) -> None:
    if rt.is_main:
        del model[2]


def _sum_lengths(rt: Any, _model: nn.Module) -> None:
    rt.sum(torch.ones(2 + rt.group.rank))


def _sum_number_and_vector(rt: Any, _model: nn.Module) -> None:
    rt.sum(torch.ones(3) if rt.group.rank else 0)


def end_in_ways(folder: str) -> None:
    """Each rank writes what became of each way: the error's two lines, or that there was none."""
    os.chdir(folder)
    said: dict[str, str] = {}
    with hpcddp.init() as group:
        for after in (_scale, _export, _cut, _sum_lengths, _sum_number_and_vector):
            name = after.__name__

            def opened(name: str = name) -> Any:
                return hpcddp.runtime(group=group, run_dir=None if name == "_cut" else name)

            try:
                _train(opened, after)
                said[name] = ""
            except HpcddpError as error:
                said[name] = str(error)
    Path(folder, f"{group.rank}.json").write_text(json.dumps(said))
