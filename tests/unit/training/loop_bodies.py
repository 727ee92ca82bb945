"""What the ranks of the tests of the loop run."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import numpy
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import hpcddp
from hpcddp.errors import RequestError


def meet_in_numbers(folder: str) -> None:
    """Each rank writes what it gets of all ranks."""
    with hpcddp.runtime(global_batch=4) as rt:
        rank = rt.group.rank
        numbers = TensorDataset(torch.arange(7))
        _, test = rt.prepare(DataLoader(numbers, batch_size=4), DataLoader(numbers, batch_size=6))  # 2 on each rank
        mine = torch.cat([x for (x,) in test])
        found = {
            "int": rt.sum(rank + 1),
            "float": rt.sum(0.5),
            "numpy": [rt.sum(numpy.int64(rank)), rt.sum(numpy.float32(0.5))],
            "mixed": [rt.sum(0.5 if rank else 0), rt.sum(torch.tensor(0.5)).item() if rank else rt.sum(0)],
            "small": [rt.sum(torch.tensor(100, dtype=kind)).item() for kind in (torch.uint8, torch.int8, torch.int16)],
            "truth": rt.sum(torch.tensor([True, rank > 0])).tolist(),
            "complex": str(rt.sum(torch.tensor(1j)).item()),
            "vector": rt.sum(torch.tensor([1.0, 2.0])).tolist(),
            "rows": rt.gather(torch.full((rank + 1, 1), float(rank))).tolist(),
            "kinds": [rt.gather(torch.tensor([rank % 2], dtype=kind)).tolist() for kind in (torch.int16, torch.bool)],
            "nothing": list(rt.gather(torch.zeros(0, 2)).shape),
            "told": rt.broadcast(f"rank {rank}"),
            "evaluated": rt.gather(mine).tolist(),
            "batches": len(test),
        }
    behind = {
        "rt.sum": lambda: rt.sum(1),
        "rt.gather": lambda: rt.gather(mine),
        "rt.broadcast": lambda: rt.broadcast(1),
        "rt.save_model": lambda: rt.save_model("model.pt"),
        "a loop over evaluation data": lambda: list(test),
    }
    found["refused"] = [call for call, do in behind.items() if f"{call} came after the `with` body" in told_by(do)]
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


def told_by(do: Callable[[], object]) -> str:
    try:
        do()
    except RequestError as error:
        return str(error)
    return ""


def prepare_models_that_are_not_trained(folder: str) -> None:
    """Each rank has made its own. Their weights are written as they are after `rt.prepare`."""
    with hpcddp.runtime(global_batch=4) as rt:
        torch.manual_seed(rt.group.rank)
        model, teacher = nn.Linear(2, 1), nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).requires_grad_(False)
        teacher.register_buffer("mask", torch.tensor([rt.is_main, not rt.is_main]))
        teacher.register_buffer("phase", torch.randn(2, dtype=torch.complex64))
        with torch.no_grad():
            teacher[0].weight.set_(torch.randn(2, 3).t())  # not contiguous
        target = copy.deepcopy(model).requires_grad_(False)
        averaged = AveragedModel(model)
        model, teacher, target, averaged = rt.prepare(model, teacher, target, averaged)
        named = {"model": rt.unwrap(model), "teacher": teacher, "target": target, "averaged": averaged.module}
        found = {
            f"{name}.{key}": str(value.tolist()) for name, of in named.items() for key, value in of.state_dict().items()
        }
        found["same"] = str(torch.equal(target.weight, rt.unwrap(model).weight))
    Path(folder, f"{rt.group.rank}.json").write_text(json.dumps(found))


def learn_from_a_teacher(folder: str) -> None:
    """The teacher is in training mode, and keeps running statistics. The last global batch leaves ranks without
    samples. Rank 0 writes the statistics."""
    torch.manual_seed(3)
    student = nn.Linear(4, 3).double()
    teacher = nn.Sequential(nn.Linear(4, 12), nn.Unflatten(1, (3, 2, 2)), nn.BatchNorm2d(3)).double()
    teacher.requires_grad_(False)
    data = TensorDataset(torch.randn(9, 4, dtype=torch.float64))
    with hpcddp.runtime(global_batch=4, exact="integer", slices=4) as rt:
        optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
        student, teacher, optimizer, loader = rt.prepare(student, teacher, optimizer, DataLoader(data, 4))
        for _ in rt.epochs(2):
            for batch in loader:
                for (x,) in rt.micro_batches(batch):
                    rt.backward((student(x) - teacher(x).mean((2, 3))).square().mean())
                optimizer.step()
                optimizer.zero_grad()
    Path(folder, f"{rt.group.world_size}.{rt.group.rank}.json").write_text(json.dumps(teacher[2].running_mean.tolist()))
