"""Train a line on noise, slowly: `here-RANK` after the third step, and the number of steps in `steps-RANK` at the end.

If there is a file `freeze`, each rank stops itself (SIGSTOP) after the fourth step, when it has written `frozen-RANK`.

Arguments: epochs, seconds per step (no longer once there is a file `hurry`), and a step behind which no attempt comes.
"""

import atexit
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import hpcddp

epochs, step_s = int(sys.argv[1]), float(sys.argv[2])
wall = int(sys.argv[3]) if len(sys.argv) > 3 else None
rank = os.environ["RANK"]
torch.manual_seed(0)  # the same data on every rank
dataset = TensorDataset(torch.randn(8, 2), torch.randn(8, 1))
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with hpcddp.runtime(global_batch=4) as rt:
    atexit.register(lambda: Path(f"steps-{rank}").write_text(str(rt.steps)))  # also where it is stopped in time
    model = rt.wrap(model)
    loader = rt.loader(dataset)
    rt.track(model=model, optimizer=optimizer)
    first = rt.steps
    if first == wall:
        rt.stop("the wall")
    for _epoch in rt.epochs(epochs):
        for x, y in loader:
            if rt.steps == first + 3:
                Path(f"here-{rank}").touch()
            if rt.steps == first + 4 and Path("freeze").exists():
                Path(f"frozen-{rank}").touch()
                os.kill(os.getpid(), signal.SIGSTOP)
            optimizer.zero_grad()
            rt.backward((model(x) - y).square().mean())
            optimizer.step()
            time.sleep(0 if Path("hurry").exists() else step_s)
            if rt.steps + 1 == wall:
                rt.stop("the wall")
