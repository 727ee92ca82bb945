"""Context parallel by hand: each rank has a part of every sequence, and gathers the keys and values of all parts.
Torch's own, torch.distributed.tensor.experimental.context_parallel, is for GPUs: it has no attention for CPUs."""

import argparse

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss, scaled_dot_product_attention

import hpcddp

parser = argparse.ArgumentParser()
parser.add_argument("--length", type=int, default=48, help="of a sequence: a multiple of the ranks")
parser.add_argument("--double", action="store_true", help="float64, to compare runs with each other")
args = parser.parse_args()
torch.set_default_dtype(torch.float64 if args.double else torch.float32)


class Gather(torch.autograd.Function):  # all parts; in the backward pass each rank gets the gradient of its own
    @staticmethod
    def forward(_, part):
        dist.all_gather(parts := [torch.empty_like(part) for _ in range(dist.get_world_size())], part)
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(_, gradient):
        parts = [part.contiguous() for part in gradient.chunk(dist.get_world_size(), dim=2)]
        dist.reduce_scatter(mine := torch.empty_like(parts[0]), parts)
        return mine


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(32, 96, bias=False), torch.nn.Linear(32, 1)

    def forward(self, x, visible):
        q, k, v = (part.unflatten(2, (4, 8)).transpose(1, 2).contiguous() for part in self.qkv(x).chunk(3, -1))
        mixed = scaled_dot_product_attention(q, Gather.apply(k), Gather.apply(v), attn_mask=visible)
        return self.out(mixed.transpose(1, 2).flatten(2))


with hpcddp.init() as group:
    torch.manual_seed(0)  # the same data and first weights on every rank
    model = Attention().to(group.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    mine = torch.arange(args.length).chunk(group.world_size)[group.rank]  # this rank's tokens of every sequence
    visible = torch.ones(args.length, args.length, dtype=torch.bool).tril()[mine].to(group.device)  # no later tokens
    for _ in range(40):
        x = torch.randn(16, args.length, 32)
        y = x.sum(2, keepdim=True).cumsum(1) / args.length
        loss = mse_loss(model(x[:, mine].to(group.device), visible), y[:, mine].to(group.device)) / group.world_size
        optimizer.zero_grad()
        loss.backward()
        for weight in model.parameters():
            dist.all_reduce(weight.grad)
        optimizer.step()
    dist.all_reduce(loss.detach())
    group.is_first and print(f"loss {loss.item():.4f} with {len(mine)} of {args.length} tokens on a rank")
    group.is_first and torch.save(model.state_dict(), "model.pt")
