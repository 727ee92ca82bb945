"""What the ranks of the tests run. Each function gets one JSON argument and leaves its results in files."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import hpcddp
from hpcddp.training.rendezvous import process_group, store

SAMPLES, FEATURES, CLASSES = 23, 5, 3


def toy_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(SAMPLES, FEATURES, dtype=torch.float64, generator=generator)
    return TensorDataset(x, torch.randint(CLASSES, (SAMPLES,), generator=generator))


def toy_model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Linear(FEATURES, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, CLASSES)]
    return nn.Sequential(*layers).double()


def train_toys(arguments: list[dict[str, Any]]) -> None:
    """One training after the other, in the same process."""
    for argument in arguments:
        train_toy(argument)


def train_toy(argument: dict[str, Any]) -> None:
    """The loop of the manual on the toy; rank 0 writes the weights after each step to argument["out"]."""
    trajectory = []
    with hpcddp.runtime(
        argument["global_batch"],
        seed=5,
        max_micro_batch=argument.get("max_micro_batch"),
        run_dir=argument.get("run_dir"),
        save_every=argument.get("save_every"),
    ) as rt:
        model = rt.wrap(toy_model(argument.get("dropout", 0.0)))
        loader = rt.loader(toy_data())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        rt.track(model=model, optimizer=optimizer, scheduler=scheduler)
        for _epoch in rt.epochs(argument.get("epochs", 2)):
            for batch in loader:
                optimizer.zero_grad()
                for x, y in rt.micro_batches(batch):
                    rt.backward(cross_entropy(model(x), y))
                optimizer.step()
                scheduler.step()
                _misbehave(argument, rt)
                trajectory.append((rt.steps + 1, [p.detach().clone() for p in model.parameters()]))
    if rt.group.is_first and "out" in argument:
        torch.save({"trajectory": trajectory, "reason": rt.stop_reason}, argument["out"])
    if rt.stop_reason == "SIGUSR1":  # a launcher's signal may reach a rank that has ended by another's
        os.kill(os.getpid(), signal.SIGUSR1)


def _misbehave(argument: dict[str, Any], rt: Any) -> None:
    """What goes wrong on one rank at one step, if the test wants it."""
    fault = argument.get("fault")
    if fault and (rt.group.rank, rt.steps) == (fault["rank"], fault["step"]):
        if fault["how"] == "raise":
            raise ValueError("a broken sample")
        os.kill(os.getpid(), getattr(signal, fault["how"]))


def reference_toy(argument: dict[str, Any], order: Any) -> list[list[torch.Tensor]]:
    """The same in plain torch, one process, each global batch in one piece; `order(epoch)` lists the samples."""
    model = toy_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    x, y = toy_data().tensors
    trajectory = []
    for epoch in range(argument.get("epochs", 2)):
        samples = order(epoch)
        for start in range(0, SAMPLES, argument["global_batch"]):
            chosen = samples[start : start + argument["global_batch"]]
            optimizer.zero_grad()
            cross_entropy(model(x[chosen]), y[chosen]).backward()
            optimizer.step()
            scheduler.step()
            trajectory.append([p.detach().clone() for p in model.parameters()])
    return trajectory


def meet(argument: dict[str, Any]) -> None:
    """Only the process group: each rank writes what it sees, and the sum of all ranks."""
    with hpcddp.init(arrival_timeout_s=600) as group:
        total = torch.tensor([float(group.rank)])
        dist.all_reduce(total)
        seen = {"rank": group.rank, "size": group.world_size, "local": group.local_rank, "sum": total.item()}
        Path(argument["folder"], f"seen-{group.rank}.json").write_text(json.dumps(seen))


def meet_often(argument: dict[str, Any]) -> None:
    """One group after the other, more than a port has stand-ins; the stores of all stay there to the end."""
    kept = []
    for number in range(8):
        with hpcddp.init() as group:
            total = torch.tensor([float(group.rank + number)])
            dist.all_reduce(total)
            kept.append((group, total.item()))
    Path(argument["folder"], f"sums-{group.rank}.json").write_text(json.dumps([total for _, total in kept]))


def meet_in_vain(argument: dict[str, Any]) -> None:
    """The same with ranks that do not come. The time to wait for them, 1 s, begins when the others have done theirs:
    `rank 1 is here`, or `the other has ended`. Till then there is all the time in the world."""
    call_roll = process_group.call_roll
    end = Path(argument["folder"], f"end-of-{os.getpid()}")
    seen = {
        "rank 1 is here": lambda shared: shared.check(["member/1"]),
        "the other has ended": lambda _: any(end.parent.glob("end-of-*")),
    }

    def call(shared: Any, me: Any, world_size: int, timeout_s: float) -> Any:
        if me.rank > 0:
            return call_roll(shared, me, world_size, timeout_s)
        store.wait_until(lambda: seen[argument["given_up_when"]](shared), timeout_s)
        return call_roll(shared, me, world_size, 1.0)

    process_group.call_roll = call
    store._ANSWER_TIMEOUT_S = 600.0
    try:
        meet(argument)
    finally:
        end.touch()


def train_reference(argument: list[str]) -> None:
    """The reference trainer with this command line; the exit status is its own."""
    from hpcddp.cli.main import main

    raise SystemExit(main(["train", *argument]))
