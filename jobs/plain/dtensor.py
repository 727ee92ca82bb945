"""DeviceMesh and DTensor by hand: ranks in rows and columns, the batch over the rows, the weights over the columns."""

import argparse

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.functional import mse_loss

import hpcddp

parser = argparse.ArgumentParser()
parser.add_argument("--columns", type=int, default=2, help="ranks that share the weights; of one node, to be fast")
parser.add_argument("--batch", type=int, default=64, help="samples in each step, over all rows")
parser.add_argument("--steps", type=int, default=80)
parser.add_argument("--double", action="store_true", help="float64, to compare runs with each other")
args = parser.parse_args()
torch.set_default_dtype(torch.float64 if args.double else torch.float32)

with hpcddp.init() as group:
    columns = min(args.columns, group.world_size)
    shape = (group.world_size // columns, columns)
    mesh = init_device_mesh(group.device.type, shape, mesh_dim_names=("batch", "weights"))
    torch.manual_seed(0)
    x = torch.randn(1024, 20, device=group.device)
    y = x.sum(1, keepdim=True)
    wide = torch.randn(20, 64, device=group.device) / 20**0.5  # each column of ranks has some of its columns
    tall = torch.randn(64, 1, device=group.device) / 64**0.5  # and the same rows of this one
    weights = [
        distribute_tensor(wide, mesh, [Replicate(), Shard(1)]).requires_grad_(),
        distribute_tensor(tall, mesh, [Replicate(), Shard(0)]).requires_grad_(),
    ]
    optimizer = torch.optim.AdamW(weights, lr=0.01)
    for step in range(args.steps):
        first = step * args.batch % len(x)
        samples, targets = (
            distribute_tensor(whole[first : first + args.batch], mesh, [Shard(0), Replicate()]) for whole in (x, y)
        )
        guess = torch.tanh(samples @ weights[0]) @ weights[1]  # a sum over the columns is still to be made: Partial
        guess = guess.redistribute(mesh, [Shard(0), Replicate()])
        # a sum: the gradient of mse_loss's own mean is that of each row's samples, too large by the number of rows
        loss = mse_loss(guess, targets, reduction="sum").full_tensor() / args.batch
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 19:
            group.is_first and print(f"step {step + 1}: loss {loss.item():.4f}")
    whole = {name: w.full_tensor().detach() for name, w in zip(("wide", "tall"), weights, strict=True)}
    if group.is_first:
        torch.save(whole, "model.pt")
