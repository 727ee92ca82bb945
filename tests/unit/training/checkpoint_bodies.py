"""What the ranks of the tests of checkpoints and strategies run."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import hpcddp

SAMPLES, FEATURES, CLASSES = 23, 5, 3


class Block(nn.Sequential):
    """What a strategy gathers on its own."""


class Numbered(TensorDataset):
    """Samples that are told apart: x is (features, number)."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return (*super().__getitem__(index), index)


def make_data() -> Numbered:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(SAMPLES, FEATURES, dtype=torch.float64, generator=generator)
    return Numbered(x, torch.randint(CLASSES, (SAMPLES,), generator=generator))


def make_model(norm: bool = False) -> nn.Module:
    torch.manual_seed(3)
    first = Block(nn.Linear(FEATURES, 9), nn.BatchNorm1d(9) if norm else nn.Identity(), nn.Tanh())
    return nn.Sequential(first, Block(nn.Linear(9, 7), nn.Tanh(), nn.Dropout(0.0)), nn.Linear(7, CLASSES)).double()


def train_all(arguments: list[dict[str, Any]]) -> None:
    """One after the other, in the same processes."""
    for argument in arguments:
        train(argument)


def train(argument: dict[str, Any]) -> None:
    """The loop with everything in a checkpoint; rank 0 writes losses, weights and states to argument["out"]."""
    strategy = argument.get("strategy", "ddp")
    seen: list[tuple[int, int]] = []  # (epoch, sample) as this rank drew them
    draws: list[float] = []
    weights: list[list[torch.Tensor]] = []
    with hpcddp.runtime(
        argument.get("global_batch", 10),
        seed=5,
        max_micro_batch=argument.get("max_micro_batch"),
        run_dir=argument.get("run_dir"),
        save_every=argument.get("save_every"),
        checkpoint=argument.get("checkpoint"),
    ) as rt:
        blocks = Block if strategy != "ddp" else None
        model = rt.wrap(make_model(argument.get("norm", False)), strategy, blocks=blocks)
        loader = rt.loader(make_data(), collate_fn=lambda samples: torch.utils.data.default_collate(samples))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
        objects: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        ema = scaler = None
        if argument.get("ema"):
            ema = objects["ema"] = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        if argument.get("scaler"):
            scaler = objects["scaler"] = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=3)
        rt.track(**objects)
        for epoch in rt.epochs(argument.get("epochs", 2)):
            draws.append(_draw())
            for batch in loader:
                x, y, numbers = batch.x
                if batch.samples:
                    seen += [(epoch, int(number)) for number in numbers]
                if argument.get("draws"):
                    x = x + 0.1 * _draw()  # the user's own, outside of rt.micro
                with rt.micro(batch):
                    loss = cross_entropy(model(x), y)
                    rt.backward(scaler.scale(loss) if scaler else loss)
                if batch.last:
                    if scaler:
                        scaler.step(optimizer)
                        scaler.update()
                    else:
                        optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()
                    if ema is not None:
                        ema.update_parameters(model)
                    if rt.steps + 1 == argument.get("stop_at"):
                        rt.stop("the test's")
                    rt.step()
                    weights.append([_whole(p) for p in model.parameters()])
        states = {name: _plain(thing.state_dict()) for name, thing in objects.items()}
    if "out" in argument:
        rank = rt.group.rank
        Path(f"{argument['out']}.seen-{rank}.json").write_text(json.dumps(seen))
        if rank == 0:
            torch.save({"weights": weights, "states": states, "draws": draws}, argument["out"])


def _draw() -> float:
    return random.random() + float(torch.rand(()))


def _whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def _plain(state: Any) -> Any:
    """Whole tensors, without the names that DDP gives."""
    if isinstance(state, torch.Tensor):
        return _whole(state)
    if isinstance(state, dict):
        return {str(key).replace("module.module.", "module."): _plain(value) for key, value in state.items()}
    return [_plain(value) for value in state] if isinstance(state, list | tuple) else state


def save_and_be_killed(argument: dict[str, Any]) -> None:
    """Train and save at every step, until a timer kills this rank at a random moment."""
    seconds = random.Random(f"{argument['seed']}").uniform(0.0, argument["within_s"])
    if "kill" in argument:
        threading.Timer(argument["after_s"] + seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    train(argument)
    time.sleep(argument["within_s"])
