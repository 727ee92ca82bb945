"""What the ranks of the tests of the layout run: trainings in which some ranks share their samples."""

from __future__ import annotations

import os
from typing import Any

import torch
from checkpoint_bodies import make_data, make_model
from torch import nn
from torch.nn.functional import cross_entropy

from hpcddp.parallelism import read_parallel
from hpcddp.training.opening import open_runtime
from hpcddp.training.options import RuntimeOptions


def train_all(arguments: list[dict[str, Any]]) -> None:
    """One training after the other, in the same processes; every rank writes what it saw and got."""
    for argument in arguments:
        train(argument)


def train(argument: dict[str, Any]) -> None:
    """A replicated model, on ranks of which `model_ranks` share a data rank."""
    options = RuntimeOptions(
        global_batch=argument.get("global_batch", 10),
        seed=5,
        model_mesh=(("tensor", argument["model_ranks"]),),
        parallel=read_parallel(argument.get("parallel", "ddp"), "the test"),
        **argument["options"],
    )
    seen, gradients, random_numbers = [], [], []
    with open_runtime(os.environ, options) as rt:
        model = rt.wrap(make_model(argument.get("norm", False)))
        loader = rt.loader(make_data(), count=_count if argument.get("count") else None)
        held_out = rt.evaluation_loader(make_data(), batch_size=4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        rt.track(model=model, optimizer=optimizer)
        for epoch in rt.epochs(argument.get("epochs", 2)):
            for batch in loader:
                for x, y, numbers in rt.micro_batches(batch):
                    seen += [(epoch, int(number)) for number in numbers[: rt.samples]]
                    random_numbers.append(float(torch.rand(())))
                    loss = cross_entropy(model(x), y, reduction="sum")
                    rt.backward(loss / (_count((x, y, numbers)) if argument.get("count") else len(y)))
                gradients.append([_whole(parameter.grad) for parameter in model.parameters()])
                optimizer.step()
                optimizer.zero_grad()
        evaluated, sums = [], torch.zeros(2, dtype=torch.float64)
        with torch.no_grad():
            model.eval()
            for x, y, numbers in held_out:
                evaluated += [int(number) for number in numbers]
                losses = cross_entropy(model(x), y, reduction="none")
                sums += torch.stack([losses.sum(), torch.tensor(float(len(y)), dtype=torch.float64)])
        result = {
            "seen": seen,
            "gradients": gradients,
            "random numbers": random_numbers,
            "evaluated": evaluated,
            "total": rt.sum(sums).tolist(),
            "weights": [_whole(parameter) for parameter in model.parameters()],
            "buffers": [buffer.clone() for buffer in model.buffers()],
        }
    torch.save(result, f"{argument['out']}-{rt.group.rank}")


def _count(batch: Any) -> int:
    """A sample counts by its number, some for more than others."""
    return int((batch[2] + 1).sum())


def _whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def place(argument: dict[str, Any]) -> None:
    """The mesh of a sharded model is that of the data ranks."""
    options = RuntimeOptions(global_batch=4, model_mesh=(("tensor", 2),), parallel=read_parallel("fsdp", "the test"))
    with open_runtime(os.environ, options) as rt:
        model = rt.wrap(nn.Linear(4, 4))
        mesh = next(model.parameters()).device_mesh
        torch.save(mesh.mesh.tolist(), f"{argument['out']}-{rt.group.rank}")
