"""Made the run folders beside this file, with the loop of hpcddp 0.1 at commit 55e06aa; paths and names were replaced.

    hpcddp render --site local --nodes 1 --ranks-per-node 2 --name single --global-batch 8 -- python train.py single

The chain is two attempts of three, on a stand-in for PBS; the third is queued.

    hpcddp render --site generic-pbs --nodes 1 --ranks-per-node 1 --name chain --global-batch 8 --set chain=3 \\
        -- python train.py chain
"""

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import hpcddp

how = sys.argv[1]
exact = how == "exact"
stop_at = 4 if how in ("sharded", "exact") else None
generator = torch.Generator().manual_seed(1)
x = torch.randn(24, 4, generator=generator)
dataset = TensorDataset(x, (x.sum(1) > 0).long())
with hpcddp.runtime(
    global_batch=8,
    seed=3,
    checkpoint={"async": "async", "sharded": "sharded"}.get(how),
    exact="tree" if exact else False,
    slices=2 if exact else None,
    save_every=2,
    keep=2,
) as rt:
    model = rt.wrap(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    loader = rt.loader(dataset)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    rt.track(model=model, optimizer=optimizer, scheduler=scheduler)
    if how == "chain":
        stop_at = rt.steps + 2
    for _ in rt.epochs(2):
        for batch in loader:
            with rt.micro(batch):
                rt.backward(nn.functional.cross_entropy(model(batch.x), batch.y))
            if batch.last:
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                if rt.steps + 1 == stop_at:
                    rt.stop("the deadline")
                rt.step()
