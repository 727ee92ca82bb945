"""A model in stages on different ranks, with hpcddp's runtime; the same script trains with any other `parallel:`."""

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

torch.manual_seed(0)  # the same data and first weights on every rank
x = torch.randn(1000, 20)
model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
model.pipeline_stages = ["2"]  # where the second stage begins
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=64, shuffle=True)


def loss_of(batch):
    x, y = batch
    return mse_loss(model(x), y, reduction="sum")


with hpcddp.runtime(seed=0, max_micro_batch=8) as rt:  # small micro batches: the stages wait less for each other
    model, optimizer, loader = rt.prepare(model, optimizer, loader)  # resumes here
    for epoch in rt.epochs(args.epochs):
        total, samples = 0.0, 0
        for step in loader.steps():
            optimizer.zero_grad()
            losses = rt.train_step(step, loss_of, summed=True)  # all micro batches of a step, forward and backward
            optimizer.step()
            total += losses.sum()
            samples += rt.micro_batch_samples
        rt.print(f"epoch {epoch}: loss {rt.sum(total) / max(rt.sum(samples), 1):.4f}")
    rt.save_model("model.pt")  # the whole model
