"""A model whose halves are on two GPUs of each rank; DDP averages the gradients of each half where it is."""

import argparse

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import hpcddp

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--double", action="store_true", help="float64, to compare runs with each other")
args = parser.parse_args()
torch.set_default_dtype(torch.float64 if args.double else torch.float32)


class Halves(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(20, 64), nn.Tanh()).to(first)
        self.second = nn.Linear(64, 1).to(second)
        self.between = second

    def forward(self, x):  # x is on the first device
        return self.second(self.first(x).to(self.between))


torch.manual_seed(0)  # the same data on every rank
x = torch.randn(1000, 20)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=64, shuffle=True)

with hpcddp.runtime(seed=0) as rt:
    devices = rt.devices  # cuda:0 and cuda:1 on the first rank, cuda:2 and cuda:3 on the next
    if len(devices) < 2:
        rt.print(f"a stand-in: both halves are on {devices[0]}")
    model = Halves(devices[0], devices[-1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = rt.prepare(model, optimizer, loader)  # resumes here; both halves stay where they are
    for epoch in rt.epochs(args.epochs):
        total, samples = 0.0, 0
        for x, y in loader:
            optimizer.zero_grad()
            loss = mse_loss(model(x), y.to(devices[-1]))
            rt.backward(loss)
            optimizer.step()
            total += loss.detach() * rt.samples
            samples += rt.samples
        rt.print(f"epoch {epoch}: loss {rt.sum(total) / max(rt.sum(samples), 1):.4f}")
    rt.save_model("model.pt")
