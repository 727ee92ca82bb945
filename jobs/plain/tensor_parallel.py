"""Tensor parallel by hand, and FSDP2 over the rest: neighbours share each layer, and see the same samples."""

import argparse

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hpcddp

parser = argparse.ArgumentParser()
parser.add_argument("--tensor", type=int, default=2, help="ranks that share each layer; of one node, to be fast")
parser.add_argument("--batch", type=int, default=64, help="samples in each step, over all ranks")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--double", action="store_true", help="float64, to compare runs with each other")
args = parser.parse_args()
torch.set_default_dtype(torch.float64 if args.double else torch.float32)

with hpcddp.init() as group:
    tensor = min(args.tensor, group.world_size)
    rows = group.world_size // tensor
    mesh = init_device_mesh(group.device.type, (rows, tensor), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)  # the same data and first weights on every rank
    x = torch.randn(1024, 20)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).to(group.device)
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])  # not DDP: with it, the model's parameters would vanish
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sampler = DistributedSampler(data, rows, mesh.get_local_rank("data"))  # not the rank: neighbours take the same
    loader = DataLoader(data, args.batch // rows, sampler=sampler)
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
