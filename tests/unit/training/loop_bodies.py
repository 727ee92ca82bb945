"""What the ranks of the tests of the loop run."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import hpcddp


def meet_in_numbers(folder: str) -> None:
    """Each rank writes what it gets of all ranks."""
    with hpcddp.runtime(global_batch=4) as rt:
        rank = rt.group.rank
        numbers = TensorDataset(torch.arange(7))
        _, test = rt.prepare(DataLoader(numbers, batch_size=2), DataLoader(numbers, batch_size=2))
        mine = torch.cat([x for (x,) in test])
        found = {
            "int": rt.sum(rank + 1),
            "float": rt.sum(0.5),
            "vector": rt.sum(torch.tensor([1.0, 2.0])).tolist(),
            "rows": rt.gather(torch.full((rank + 1, 1), float(rank))).tolist(),
            "told": rt.broadcast(f"rank {rank}"),
            "evaluated": rt.gather(mine).tolist(),
            "batches": len(test),
        }
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
