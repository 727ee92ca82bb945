"""A script for one node that starts its own ranks with mp.spawn, at a fixed address, as many tutorials have it."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() or 2)
parser.add_argument("--batch", type=int, default=64, help="samples in each step, over all ranks")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--double", action="store_true", help="float64, to compare runs with each other")
args = parser.parse_args()


def train(rank: int, world_size: int) -> None:
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    x = torch.randn(1024, 20)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    net = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).to(device)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch // world_size, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            mse_loss(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
    if rank == 0:
        print(f"{world_size} ranks")
        torch.save(net.state_dict(), "model.pt")


def worker(rank: int, world_size: int) -> None:
    torch.set_default_dtype(torch.float64 if args.double else torch.float32)
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", rank=rank, world_size=world_size)
    train(rank, world_size)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(worker, args=(args.ranks,), nprocs=args.ranks)
