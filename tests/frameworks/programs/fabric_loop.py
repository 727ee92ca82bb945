"""A loop of Lightning Fabric with no word about devices or nodes: nothing of hpcddp. Writes what this rank saw to
argv[1]."""

import json
import sys
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

fabric = Fabric(accelerator="cpu")
fabric.launch()
fabric.seed_everything(0)
model = torch.nn.Linear(1, 1)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1e-4))
loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.arange(48.0).reshape(48, 1)), batch_size=4))
seen = []
for (x,) in loader:
    seen += [int(value) for value in x.flatten()]
    optimizer.zero_grad()
    fabric.backward(model(x).pow(2).mean())
    optimizer.step()
found = {"world_size": fabric.world_size, "seen": seen}
Path(sys.argv[1], f"rank-{fabric.global_rank}.json").write_text(json.dumps(found))
