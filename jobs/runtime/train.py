"""A training loop with hpcddp's runtime: one batch size for any number of ranks; checkpoints, stop in time, resume."""

import argparse

import torch
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
model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
model.tensor_plan = {"0": "colwise", "2": "rowwise"}  # how tensor ranks divide the layers, where there are any
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=64, shuffle=True)

with hpcddp.runtime(seed=0) as rt:
    model, optimizer, loader = rt.prepare(model, optimizer, loader)  # resumes here
    for epoch in rt.epochs(args.epochs):
        total, samples = 0.0, 0
        for x, y in loader:
            optimizer.zero_grad()
            loss = mse_loss(model(x), y)
            rt.backward(loss)
            optimizer.step()
            total += loss.detach() * rt.samples  # the ranks may have a sample more or less
            samples += rt.samples
        rt.print(f"epoch {epoch}: loss {rt.sum(total) / max(rt.sum(samples), 1):.4f}")
    rt.save_model("model.pt")
