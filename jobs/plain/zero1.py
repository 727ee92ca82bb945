"""ZeRO-1 by hand: DDP whose optimizer state is dealt out over the ranks."""

import argparse

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hpcddp

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=32, help="samples of one rank in each step")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--double", action="store_true", help="float64, to compare runs with each other")
args = parser.parse_args()
torch.set_default_dtype(torch.float64 if args.double else torch.float32)

with hpcddp.init() as group:
    torch.manual_seed(0)  # the same data and first weights on every rank
    x = torch.randn(1024, 20)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    net = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).to(group.device)
    model = DistributedDataParallel(net, device_ids=None if group.device.type == "cpu" else [group.device])
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.batch, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = mse_loss(model(x.to(group.device)), y.to(group.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()  # each rank steps on its share of the weights, and sends them to the others
        torch.distributed.all_reduce(loss.detach())
        if group.is_first:
            print(f"epoch {epoch}: loss {loss.item() / group.world_size:.4f}")
    if group.is_first:  # for the optimizer's state, too: optimizer.consolidate_state_dict() on every rank first
        torch.save(net.state_dict(), "model.pt")
