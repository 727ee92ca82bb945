"""A small model and its data, for tests of the training loop in one process."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from hpcddp.training.data.loader import TrainingLoader
from hpcddp.training.runtime import Runtime

SAMPLES, FEATURES, CLASSES = 20, 4, 3


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(SAMPLES, FEATURES, dtype=torch.float64, generator=generator)
    return TensorDataset(x, torch.randint(CLASSES, (SAMPLES,), generator=generator))


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


class Toy(NamedTuple):
    """What `rt.prepare` gave: a loop over `loader` has four steps per epoch."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: TrainingLoader

    def step(self, rt: Runtime, x: Tensor, y: Tensor) -> None:
        """What a loop does with a batch that is one micro batch."""
        self.step_in_parts(rt, (x, y))

    def step_in_parts(self, rt: Runtime, batch: Any) -> None:
        """What a loop does with a batch."""
        self.optimizer.zero_grad()
        for x, y in rt.micro_batches(batch):
            rt.backward(cross_entropy(self.model(x), y))
        self.optimizer.step()


def prepare_toy(rt: Runtime) -> Toy:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Toy(*rt.prepare(model, optimizer, DataLoader(make_data(), batch_size=6)))


def weights_of(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def deviation(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
