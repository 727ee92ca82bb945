"""Sequence parallel by torch's styles: between two divided layers, each rank has a part of every sequence."""

import argparse

import torch
import torch.distributed.tensor.parallel as tp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.nn.functional import mse_loss

import hpcddp

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=16, help="sequences in each step")
parser.add_argument("--length", type=int, default=48, help="of a sequence")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--double", action="store_true", help="float64, to compare runs with each other")
args = parser.parse_args()
torch.set_default_dtype(torch.float64 if args.double else torch.float32)

PLAN = {
    "0": tp.PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),  # cuts the sequences
    "0.norm": tp.SequenceParallel(),  # each rank normalizes its tokens, and keeps those only for the backward pass
    "0.up": tp.ColwiseParallel(input_layouts=Shard(1)),  # an all-gather, where tensor parallel alone has nothing
    "0.down": tp.RowwiseParallel(output_layouts=Shard(1), use_local_output=False),  # reduce-scatter, not all-reduce
}


class Block(torch.nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(width), torch.nn.Linear(width, 64), torch.nn.Linear(64, 1)

    def forward(self, x):
        return self.down(torch.tanh(self.up(self.norm(x))))


with hpcddp.init() as group:
    mesh = init_device_mesh(group.device.type, (group.world_size,), mesh_dim_names=("tensor",))
    torch.manual_seed(0)  # the same data and first weights on every rank
    model = torch.nn.Sequential(Block(32)).to(group.device)
    tp.parallelize_module(model, mesh, PLAN)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(args.steps):
        x = torch.randn(args.batch, args.length, 32, device=group.device)
        y = x[..., :1] - x[..., 1:2]  # nothing that the norm takes away
        loss = mse_loss(model(x).full_tensor(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            group.is_first and print(f"step {step + 1}: loss {loss.item():.4f}")
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))  # all ranks
    if group.is_first:
        torch.save(whole, "model.pt")
