"""Pipeline parallel by hand: each rank has some layers, and a global batch goes through as micro batches."""

import argparse

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import hpcddp

parser = argparse.ArgumentParser()
parser.add_argument("--schedule", choices=("gpipe", "1f1b"), default="1f1b")
parser.add_argument("--micro-batches", type=int, default=4, help="at least as many as ranks for 1f1b; all of one size")
parser.add_argument("--batch", type=int, default=64, help="samples in each step")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--double", action="store_true", help="float64, to compare runs with each other")
args = parser.parse_args()
if args.batch % args.micro_batches:
    parser.error(f"--batch {args.batch} does not divide into {args.micro_batches} micro batches of one size")
torch.set_default_dtype(torch.float64 if args.double else torch.float32)

with hpcddp.init() as group:
    torch.manual_seed(0)  # the same data, order and first weights on every rank
    x = torch.randn(1024, 20)
    blocks = [torch.nn.Sequential(torch.nn.Linear(20, 20), torch.nn.Tanh()) for _ in range(3)]
    layers = torch.nn.ModuleDict({str(i): block for i, block in enumerate([*blocks, torch.nn.Linear(20, 1)])})
    size, rank = group.world_size, group.rank
    mine = [str(i) for i in range(len(layers)) if i * size // len(layers) == rank]
    part = torch.nn.Sequential(*(layers[i] for i in mine)).to(group.device)
    stage = PipelineStage(part, rank, size, group.device)
    make = Schedule1F1B if args.schedule == "1f1b" else ScheduleGPipe
    schedule = make(stage, args.micro_batches, loss_fn=mse_loss)  # the gradient is the mean over the micro batches
    optimizer = torch.optim.AdamW(part.parameters(), lr=0.01)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    loader = DataLoader(data, args.batch, shuffle=True, drop_last=True)  # a smaller last batch is left out of the epoch
    for epoch in range(args.epochs):
        for x, y in loader:
            losses: list[torch.Tensor] = []
            last = {"target": y.to(group.device), "losses": losses} if rank == size - 1 else {}
            optimizer.zero_grad()
            schedule.step(*([x.to(group.device)] if rank == 0 else []), **last)
            optimizer.step()
        mean = torch.stack(losses).mean() if losses else torch.zeros((), device=group.device)
        dist.broadcast(mean, src=size - 1)  # the last rank knows it, and the first one prints
        group.is_first and print(f"epoch {epoch}: loss {mean.item():.4f}")
    parts = [None] * size
    dist.all_gather_object(parts, {i: {k: v.cpu() for k, v in layers[i].state_dict().items()} for i in mine})
    if group.is_first:
        layers.cpu()
        for found in parts:
            for i, state in found.items():
                layers[i].load_state_dict(state)
        torch.save(layers.state_dict(), "model.pt")
