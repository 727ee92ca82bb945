"""DeepSpeed's engine with ZeRO stage 2, on the CPU: nothing of hpcddp. Writes what this rank saw to argv[1]."""

import json
import sys
from pathlib import Path

import deepspeed
import torch
from torch.utils.data import TensorDataset

deepspeed.init_distributed(dist_backend="gloo")
model = torch.nn.Linear(1, 1)
config = {"train_batch_size": 16, "zero_optimization": {"stage": 2}}
config |= {"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}}}
data = TensorDataset(torch.arange(48.0).reshape(48, 1))
engine, _, loader, _ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), training_data=data, config=config
)
seen = []
for (x,) in loader:
    seen += [int(value) for value in x.flatten()]
    engine.backward(engine(x).pow(2).mean())
    engine.step()
found = {"world_size": engine.world_size, "seen": seen}
Path(sys.argv[1], f"rank-{engine.global_rank}.json").write_text(json.dumps(found))
