"""Train a line on noise, slowly: `here-RANK` after the third step, and the number of steps in `steps-RANK` at the end.

Arguments: epochs, seconds per step, and a step behind which no attempt comes.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import hpcddp

epochs, step_s = int(sys.argv[1]), float(sys.argv[2])
wall = int(sys.argv[3]) if len(sys.argv) > 3 else None
rank = os.environ["RANK"]
dataset = TensorDataset(torch.randn(8, 2), torch.randn(8, 1))
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with hpcddp.runtime(global_batch=4) as rt:
    model = rt.wrap(model)
    loader = rt.loader(dataset)
    rt.track(model=model, optimizer=optimizer)
    first = rt.steps
    if first == wall:
        rt.stop("the wall")
    for _epoch in rt.epochs(epochs):
        for batch in loader:
            with rt.micro(batch):
                rt.backward((model(batch.x) - batch.y).square().mean())
            if batch.last:
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(step_s)
                if rt.steps + 1 == wall:
                    rt.stop("the wall")
                rt.step()
                if rt.steps == first + 3:
                    Path(f"here-{rank}").touch()
Path(f"steps-{rank}").write_text(str(rt.steps))
