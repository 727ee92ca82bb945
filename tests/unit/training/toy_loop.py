"""A small model and its data, for tests of the training loop in one process."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

SAMPLES, FEATURES, CLASSES = 20, 4, 3


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(SAMPLES, FEATURES, dtype=torch.float64, generator=generator)
    return TensorDataset(x, torch.randint(CLASSES, (SAMPLES,), generator=generator))


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


def weights_of(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def deviation(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
