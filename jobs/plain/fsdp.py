"""FSDP2 by hand: each rank keeps a shard of the weights, gradients and optimizer state. With --shard N below the number
of ranks it is HSDP: the weights are sharded over N ranks (those of a node), and the groups of N have copies."""

import argparse

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hpcddp

parser = argparse.ArgumentParser()
parser.add_argument("--shard", type=int, default=0, help="ranks that share one copy of the model; 0: all")
parser.add_argument("--batch", type=int, default=32, help="samples of one rank in each step")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--double", action="store_true", help="float64, to compare runs with each other")
args = parser.parse_args()
torch.set_default_dtype(torch.float64 if args.double else torch.float32)

with hpcddp.init() as group:
    shard = min(args.shard or group.world_size, group.world_size)
    mesh = init_device_mesh(group.device.type, (group.world_size // shard, shard), mesh_dim_names=("copies", "shards"))
    torch.manual_seed(0)  # the same data and first weights on every rank
    x = torch.randn(1024, 20)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).to(group.device)
    for layer in model:  # layer by layer, so that only one layer's weights are whole at a time
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)  # over the shards: after fully_shard
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.batch, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = mse_loss(model(x.to(group.device)), y.to(group.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        torch.distributed.all_reduce(loss.detach())
        if group.is_first:
            print(f"epoch {epoch}: loss {loss.item() / group.world_size:.4f}")
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))  # all ranks
    if group.is_first:
        torch.save(whole, "model.pt")
