"""What ranks do with wrong words for the runtime and its model."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import hpcddp
from hpcddp.errors import RequestError


def average_sharded(_argument: None) -> None:
    data = DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=4)
    with hpcddp.init() as group:
        for wraps in (False, True):
            model = nn.Linear(4, 3)
            try:
                with hpcddp.runtime(group=group, parallel="fsdp") as rt:
                    average = AveragedModel(model)
                    if wraps:
                        average = rt.wrap(average)
                    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                    model, optimizer, loader, average = rt.prepare(model, optimizer, data, average)
                    for _ in rt.epochs(1):
                        for (x,) in loader:
                            rt.backward(model(x).mean())
                            optimizer.step()
                            optimizer.zero_grad()
                            average.update_parameters(model)
            except RequestError as error:
                if wraps:
                    raise
                print(error)
