"""FSDP1 with size-based wrapping, as older tutorials have it. For new scripts: FSDP2, fsdp.py beside this one."""

import argparse
from functools import partial

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hpcddp

parser = argparse.ArgumentParser()
parser.add_argument("--min-params", type=int, default=1000, help="modules with so many weights are gathered one by one")
parser.add_argument("--batch", type=int, default=32, help="samples of one rank in each step")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--double", action="store_true", help="float64, to compare runs with each other")
args = parser.parse_args()
torch.set_default_dtype(torch.float64 if args.double else torch.float32)

with hpcddp.init() as group:
    torch.manual_seed(0)  # the same data and first weights on every rank
    x = torch.randn(1024, 20)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    net = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    by_size = partial(size_based_auto_wrap_policy, min_num_params=args.min_params)
    model = FullyShardedDataParallel(net, auto_wrap_policy=by_size, device_id=group.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)  # over the shards: after the wrapping
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
