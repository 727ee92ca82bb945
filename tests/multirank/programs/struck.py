"""Train on noise, exactly, and be struck by a fault: once, at one step, on one rank. From then on there is
`struck-STEP`, and `again` once rank 0 has made a step in a later start.

Arguments: steps, kind of fault, rank (of so many as there are), step, and seconds per step (0.1). Of several faults,
one after the other: kinds, ranks and steps with commas between them.
"""

import sys
import time
from pathlib import Path

import torch
from faults import strike
from torch.utils.data import TensorDataset

import hpcddp

steps = int(sys.argv[1])
kinds, ranks, places = (word.split(",") for word in sys.argv[2:5])
faults = {int(at): (kind, int(rank)) for kind, rank, at in zip(kinds, ranks, places, strict=True)}
step_s = float(sys.argv[5]) if len(sys.argv) > 5 else 0.1


had_struck = Path(f"struck-{min(faults)}").exists()
torch.manual_seed(0)
data = TensorDataset(torch.randn(8 * steps, 2), torch.randn(8 * steps, 1))
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with hpcddp.runtime(global_batch=8, save_every=3, exact="integer") as rt:
    model = rt.wrap(model)
    loader = rt.loader(data)
    rt.track(model=model, optimizer=optimizer)
    for _epoch in rt.epochs(1):
        for batch in loader:
            kind, struck = faults.get(rt.steps, ("none", -1))
            mark = Path(f"struck-{rt.steps}")
            if rt.rank == struck % rt.world_size and (kind == "bug" or not mark.exists()):
                mark.touch()
                strike(kind)
            optimizer.zero_grad()
            rt.train_step(batch, lambda xy: (model(xy[0]) - xy[1]).square().mean())
            optimizer.step()
            if rt.rank == 0 and had_struck:
                Path("again").touch()
                had_struck = False
            time.sleep(step_s)
