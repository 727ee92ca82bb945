"""Loops on two ranks whose losses are means over other parts than samples, and what is said of them."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import hpcddp

CLASS_WEIGHTS = torch.tensor([1.0, 5.0, 0.2])
#: By class weights rank 0's samples, the first two of four, have the same mean in both steps; rank 1's have not.
ODD_ON_RANK_1 = [0, 1, 1, 1, 1, 0, 2, 2]

Loss = Callable[[Any, Tensor, Tensor], Tensor]


def by_class(rt: Any, scores: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(scores, y, weight=CLASS_WEIGHTS)


def longer_with_each_step(rt: Any, scores: Tensor, y: Tensor) -> Tensor:
    times = 1 + rt.steps
    return cross_entropy(scores.repeat(times, 1), y.repeat(times))


LOOPS: dict[str, tuple[Loss, list[int]]] = {
    "another share on rank 1 only": (by_class, ODD_ON_RANK_1),
    "the same shares": (by_class, [0, 1, 0, 1, 1, 0, 1, 0]),
    "other shares in each step": (longer_with_each_step, ODD_ON_RANK_1),
}


def warn_of_losses(folder: str) -> None:
    said: dict[str, str] = {}
    with hpcddp.init() as group:
        for name, (loss, targets) in LOOPS.items():
            with contextlib.redirect_stderr(io.StringIO()) as text:
                _train(group, loss, targets)
            said[name] = "".join(line for line in text.getvalue().splitlines() if "warning" in line)
    Path(folder, f"{group.rank}.json").write_text(json.dumps(said))


def _train(group: Any, loss: Loss, targets: list[int]) -> None:
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(8, 4), torch.tensor(targets))
    with hpcddp.runtime(group=group) as rt:
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = rt.prepare(model, optimizer, DataLoader(data, batch_size=4))
        for _ in rt.epochs(1):
            for x, y in loader:
                rt.backward(loss(rt, model(x), y))
                rt.step(optimizer)
