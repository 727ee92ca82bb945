"""A training loop with Lightning Fabric."""

import argparse

import torch
from lightning.fabric import Fabric
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--devices", type=int, required=True, help="ranks of each node")
parser.add_argument("--nodes", type=int, required=True)
parser.add_argument("--batch", type=int, default=32, help="samples of one rank in each step")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--double", action="store_true", help="float64 and no shuffling, to compare runs with each other")
args = parser.parse_args()
torch.set_default_dtype(torch.float64 if args.double else torch.float32)

strategy = "ddp" if args.nodes * args.devices > 1 else "auto"
fabric = Fabric(
    devices=args.devices, num_nodes=args.nodes, strategy=strategy, precision="64-true" if args.double else None
)
fabric.launch()
torch.manual_seed(0)  # the same data and first weights on every rank
x = torch.randn(1024, 20)
net = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.01))
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), args.batch, shuffle=not args.double)
loader = fabric.setup_dataloaders(loader)
for epoch in range(args.epochs):
    for x, y in loader:
        loss = mse_loss(model(x), y)
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
    mean = fabric.all_reduce(loss.detach()).item()
    fabric.print(f"epoch {epoch}: loss {mean:.4f} on {fabric.world_size} ranks")
if fabric.is_global_zero:
    torch.save(net.state_dict(), "model.pt")
