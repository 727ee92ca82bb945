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


def train(argument: dict[str, Any]) -> None:
    """`extra`: "evaluate" with gradients after each epoch, a "metric" after each backward pass, or "twice" backward."""
    generator = torch.Generator().manual_seed(7)
    data = TensorDataset(torch.randn(24, 4, generator=generator), torch.arange(24) % 3)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    with hpcddp.runtime(exact=True, slices=4) as rt:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loaders = DataLoader(data, batch_size=8), DataLoader(data, batch_size=8)
        model, optimizer, loader, test = rt.prepare(model, optimizer, *loaders)
        for _ in rt.epochs(2):
            for batch in loader:
                optimizer.zero_grad()
                for x, y in rt.micro_batches(batch):
                    rt.backward(cross_entropy(model(x), y))
                    if argument["extra"] == "metric":
                        model(x)
                    if argument["extra"] == "twice":
                        rt.backward(cross_entropy(model(-x), y))
                optimizer.step()
            if argument["extra"] == "evaluate":
                for x, _y in test:
                    model(x)
        if rt.is_main:
            weights = [parameter.tolist() for parameter in rt.unwrap(model).parameters()]
            Path(argument["out"]).write_text(json.dumps(weights))
