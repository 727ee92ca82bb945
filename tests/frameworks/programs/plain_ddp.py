"""Plain DDP in torchrun's style: nothing of hpcddp. Writes what this rank saw to the last word's folder."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
assert 0 <= int(os.environ["LOCAL_RANK"]) < int(os.environ["LOCAL_WORLD_SIZE"])
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
data = TensorDataset(torch.arange(48.0).reshape(48, 1))
seen = []
for (x,) in DataLoader(data, batch_size=4, sampler=DistributedSampler(data)):
    seen += [int(value) for value in x.flatten()]
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()
Path(sys.argv[-1], f"rank-{rank}.json").write_text(json.dumps({"world_size": world_size, "seen": seen}))
dist.destroy_process_group()
