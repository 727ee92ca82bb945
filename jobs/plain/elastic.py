"""DDP under torchrun's --max-restarts: when a rank fails, all start again from the last snapshot, in the same job."""

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=32, help="samples of one rank in each step")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--snapshot", default="snapshot.pt", help="the file of the weights after the last whole epoch")
parser.add_argument("--fail-in", type=int, help="the epoch in which the last rank fails once, to try it")
parser.add_argument("--double", action="store_true", help="float64, to compare runs with each other")
args = parser.parse_args()


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    torch.manual_seed(0)  # the same data and first weights on every rank
    x = torch.randn(1024, 20)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    net = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).to(device)
    model = DistributedDataParallel(net, device_ids=[device] if on_gpu else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch, sampler=sampler)
    done, restarts = 0, int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if os.path.exists(args.snapshot):
        saved = torch.load(args.snapshot, map_location=device)
        done = saved["epochs"]
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    for epoch in range(done, args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            mse_loss(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
        if epoch == args.fail_in and not restarts and dist.get_rank() == dist.get_world_size() - 1:
            sys.exit("this rank fails once")
        if dist.get_rank() == 0:
            print(f"epoch {epoch} is done, restarts: {restarts}", flush=True)
            state = {"epochs": epoch + 1, "model": net.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, f"{args.snapshot}.part")
            os.replace(f"{args.snapshot}.part", args.snapshot)  # whole, or not there
    if dist.get_rank() == 0:
        torch.save(net.state_dict(), "model.pt")


torch.set_default_dtype(torch.float64 if args.double else torch.float32)
dist.init_process_group()
main()
dist.destroy_process_group()
