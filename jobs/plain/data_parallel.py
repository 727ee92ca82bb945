"""nn.DataParallel: one process for all GPUs of a node. It works; DDP is faster (see data_parallel.yaml)."""

import argparse
import time

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=64, help="samples in each step, over all GPUs")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--double", action="store_true", help="float64, to compare runs with each other")
args = parser.parse_args()
if args.double:
    torch.set_default_dtype(torch.float64)

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
x = torch.randn(1024, 20)
data = TensorDataset(x, x.sum(1, keepdim=True))
net = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).to(device)
model = torch.nn.DataParallel(net)  # in each step: weights to every GPU, outputs and gradients back to GPU 0
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(data, batch_size=args.batch, shuffle=True)
begin = time.perf_counter()
for epoch in range(args.epochs):
    for x, y in loader:
        loss = mse_loss(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.4f}")
seconds = time.perf_counter() - begin
print(f"{torch.cuda.device_count()} GPUs, {args.epochs * len(data) / seconds:.0f} samples per second")
torch.save(net.state_dict(), "model.pt")
