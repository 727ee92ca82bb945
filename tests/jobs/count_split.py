"""A rank of test_splits.py: trains 4 steps, and writes what it holds and what its collectives carry in the last.

count_split.py KIND FOLDER: the name of a kind in splits.py, and the folder for each rank's file
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import hpcddp
from tests.jobs.splits import KINDS, LAYERS

SIDE, BATCH = 8, 16
NAMES = {"allreduce": "all-reduce", "allgather": "all-gather", "reduce_scatter": "reduce-scatter"}  # c10d's, ours


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(SIDE, SIDE, bias=False), nn.Linear(SIDE, SIDE, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def carried(events) -> dict[str, int]:
    """Elements of whole tensors, by collective: the largest tensor of the call, or of gloo's own record within it."""
    found: dict[str, int] = {}
    ordered = sorted(events, key=lambda event: event.time_range.start)
    for number, event in enumerate(ordered):
        if not event.name.startswith("c10d::"):
            continue
        call = next((name for key, name in NAMES.items() if key in event.name), event.name.strip("c10d:_"))
        shapes = [shape for shape in event.input_shapes if shape]
        if not shapes:  # lists of tensors: what gloo says of them
            # gloo's threads may record another call's between them
            below = next(e for e in ordered[number:] if e.name == f"gloo:{call.replace('-', '_')}")
            shapes = [shape for shape in below.input_shapes if shape]
        size = max(torch.Size(shape).numel() for shape in shapes)
        found[call] = found.get(call, 0) + (size // 4 if call == "broadcast" else size)  # zero1 sends bytes
    return found


kind = next(kind for kind in KINDS if kind.name == sys.argv[1])
model = nn.Sequential(*(Pair() for _ in range(LAYERS // 2)))
for layer, matrix in enumerate(
    layer for pair in model for layer in (pair.up, pair.down)
):  # numbers that tell where they are from
    matrix.weight.data = torch.arange(SIDE * SIDE).reshape(SIDE, SIDE) / 1024 + layer
model.tensor_plan = {"*.up": "colwise", "*.down": "rowwise"}
torch.manual_seed(0)  # four steps, since in the first three the ranks compare more than they train
data = torch.utils.data.TensorDataset(torch.randn(4 * BATCH, SIDE))
parallel = kind.parallel if kind.parallel != "hsdp" else {"data": -1, "shard": 2}  # all ranks are on one node here
with hpcddp.runtime(global_batch=BATCH, seed=0, parallel=parallel) as rt:
    model = rt.wrap(model, **({"blocks": Pair} if kind.split.is_sharded else {}))
    matrices = [layer for pair in rt.unwrap(model) for layer in (pair.up, pair.down)]
    local = [getattr(m.weight, "_local_tensor", m.weight).detach().clone() for m in matrices]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    loader = rt.loader(data)
    rt.track(model=model, optimizer=optimizer)
    for _ in rt.epochs(1):
        for (x,) in loader:
            optimizer.zero_grad()
            with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
                rt.backward(model(x.requires_grad_()).pow(2).mean())  # as if a layer were before
                gradients = [list(getattr(m.weight.grad, "_local_tensor", m.weight.grad).shape) for m in matrices]
                optimizer.step()
    states = [optimizer.state.get(m.weight, {}).get("exp_avg") for m in matrices]
    shapes = [None if state is None else list(getattr(state, "_local_tensor", state).shape) for state in states]
    found = {
        "elements": sum(matrix.weight.numel() for matrix in matrices),
        "data": [rt.layout.data_rank, rt.layout.data_size],
        "numbers": [(part.flatten() * 1024 % 1024).tolist() for part in local],
        "weights": [list(part.shape) for part in local],
        "gradients": gradients,
        "optimizer": shapes,
        "carried": carried(seen.events()),
    }
    Path(sys.argv[2], f"{rt.group.rank}.json").write_text(json.dumps(found))
