"""DeepSpeed's engine, ZeRO stage 1, 2 or 3: nothing of hpcddp, and no `deepspeed` command."""

import argparse

import deepspeed
import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--stage", type=int, default=2, choices=(1, 2, 3))
parser.add_argument("--batch", type=int, default=64, help="samples in each step, over all ranks")
parser.add_argument("--epochs", type=int, default=5)
args = parser.parse_args()

deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo")
torch.manual_seed(0)  # the same data and first weights on every rank
x = torch.randn(1024, 20)
data = TensorDataset(x, x.sum(1, keepdim=True))
net = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
config = {
    "train_batch_size": args.batch,  # the global one: DeepSpeed divides it
    "zero_optimization": {"stage": args.stage},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
}
model, optimizer, _, _ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
sampler = DistributedSampler(data)
loader = DataLoader(data, model.train_micro_batch_size_per_gpu(), sampler=sampler)
for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = mse_loss(model(x.to(model.device)), y.to(model.device))
        model.backward(loss)
        model.step()
    if model.global_rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f} on {model.world_size} ranks")
with deepspeed.zero.GatheredParameters(list(net.parameters()), enabled=args.stage == 3):  # on every rank
    if model.global_rank == 0:
        torch.save(net.state_dict(), "model.pt")
dist.destroy_process_group()
