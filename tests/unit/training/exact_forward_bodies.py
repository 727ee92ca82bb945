"""Exact runs in which the model is also called for something else than the one backward pass of a slice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import hpcddp


def train_all(out: str) -> None:
    """`evaluate` with gradients after each epoch, a `metric` after each backward pass, or `twice` backward: the weights
    of each."""
    found: dict[str, Any] = {}
    with hpcddp.init() as group:
        for extra in ("evaluate", "metric", "twice"):
            found[extra] = train(group, extra)
    if group.is_first:
        Path(out).write_text(json.dumps(found))


def train(group: Any, extra: str) -> list[Any]:
    generator = torch.Generator().manual_seed(7)
    data = TensorDataset(torch.randn(24, 4, generator=generator), torch.arange(24) % 3)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    with hpcddp.runtime(group=group, exact=True, slices=4) as rt:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loaders = DataLoader(data, batch_size=8), DataLoader(data, batch_size=8)
        net, optimizer, loader, test = rt.prepare(model, optimizer, *loaders)
        for _ in rt.epochs(2):
            for batch in loader:
                optimizer.zero_grad()
                for x, y in rt.micro_batches(batch):
                    rt.backward(cross_entropy(net(x), y))
                    if extra == "metric":
                        net(x)
                    if extra == "twice":
                        rt.backward(cross_entropy(net(-x), y))
                optimizer.step()
            if extra == "evaluate":
                for x, _y in test:
                    net(x)
    return [parameter.tolist() for parameter in model.parameters()]
