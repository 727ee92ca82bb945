"""A loop as Accelerate's documentation shows it: nothing of hpcddp. Writes what this rank saw to the folder argv[1]."""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
loader = DataLoader(TensorDataset(torch.arange(48.0).reshape(48, 1)), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
seen = []
for _ in range(int(sys.argv[2]) if len(sys.argv) > 2 else 1):
    for (x,) in loader:
        seen += [int(value) for value in x.flatten()]
        optimizer.zero_grad()
        accelerator.backward(model(x).pow(2).mean())
        optimizer.step()
rank, world_size = accelerator.process_index, accelerator.num_processes
Path(sys.argv[1], f"rank-{rank}.json").write_text(json.dumps({"world_size": world_size, "seen": seen}))
