"""What the ranks of the tests of checkpoints and strategies run."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
import resource
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import hpcddp
from hpcddp.errors import RequestError
from hpcddp.training import stopping
from hpcddp.training.checkpoint import files, resume
from hpcddp.training.gradient.buffers import average_buffers
from hpcddp.training.rendezvous.group import Group
from hpcddp.training.saves import Saves
from tests.killing import kill_at_operation

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


def train_with(argument: list[Any]) -> None:
    """A few steps with this learning rate, left before the end."""
    folder, given = argument
    options = dict(given)
    model, data = make_model(), make_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=options.pop("lr"))
    with hpcddp.runtime(8, run_dir=f"{folder}/run", **options) as rt:
        model, optimizer, loader = rt.prepare(model, optimizer, torch.utils.data.DataLoader(data, 8))
        for _ in rt.epochs(9):
            for x, y, _ in loader:
                optimizer.zero_grad()
                rt.backward(cross_entropy(model(x), y))
                optimizer.step()
                if rt.steps % 2:
                    rt.stop("the test")


def train_all(arguments: list[dict[str, Any]]) -> None:
    """One after the other, in the same processes."""
    for argument in arguments:
        train(argument)


def train(argument: dict[str, Any]) -> None:
    """The loop with everything in a checkpoint; rank 0 writes losses, weights and states to argument["out"]."""
    parallel = argument.get("parallel", "ddp")
    seen: list[tuple[int, int]] = []  # (epoch, sample) as this rank drew them
    draws: list[float] = []
    losses: list[float] = []
    weights: list[list[torch.Tensor]] = []
    states: dict[str, Any] = {}  # of a training that was not stopped
    with hpcddp.runtime(
        argument.get("global_batch", 10),
        seed=5,
        max_micro_batch=argument.get("max_micro_batch"),
        run_dir=argument.get("run_dir"),
        save_every=argument.get("save_every"),
        keep_checkpoints=argument.get("keep", 2),
        checkpoint=argument.get("checkpoint"),
        parallel=parallel,
    ) as rt:
        blocks = None if parallel in ("ddp", "zero1") else Block
        model = rt.wrap(make_model(argument.get("norm", False)), blocks=blocks)
        collate = torch.utils.data.default_collate
        loader = rt.loader(DataLoader(make_data(), shuffle=True, collate_fn=lambda samples: collate(samples)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=argument.get("total_steps", 20))
        objects: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        ema = scaler = None
        if argument.get("ema"):
            source = make_model() if blocks else model  # a sharded model cannot be copied
            ema = AveragedModel(source, multi_avg_fn=get_ema_multi_avg_fn(0.9))
            objects["ema"] = ema = rt.wrap(ema, blocks=Block) if blocks else ema
        if argument.get("scaler"):
            scaler = objects["scaler"] = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=3)
        rt.track(**objects)
        for epoch in rt.epochs(argument.get("epochs", 2)):
            draws.append(_draw())
            for batch in loader:
                optimizer.zero_grad()
                for x, y, numbers in rt.micro_batches(batch):
                    if rt.samples:
                        seen += [(epoch, int(number)) for number in numbers]
                    if argument.get("draws"):
                        x = x + 0.1 * _draw()
                    loss = cross_entropy(model(x), y)
                    rt.backward(loss, scaler=scaler)
                    losses.append(float(loss.detach()))
                if scaler is None:
                    optimizer.step()
                else:
                    scaler.step(optimizer)
                    scaler.update()
                scheduler.step()
                if ema is not None:
                    ema.update_parameters(model)
                if rt.steps + 1 == argument.get("stop_at"):
                    rt.stop("the test's")
                weights.append([_whole(p) for p in model.parameters()])
        states = {name: _plain(thing.state_dict()) for name, thing in objects.items()}
    if "out" in argument:
        rank = rt.group.rank
        Path(f"{argument['out']}.seen-{rank}.json").write_text(json.dumps(seen))
        if rank == 0:
            torch.save({"weights": weights, "states": states, "draws": draws, "losses": losses}, argument["out"])


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


def train_until_killed(argument: dict[str, Any]) -> None:
    """Train and save; one rank is killed before the nth file operation from its first step on."""
    plain = Saves.count_step
    counting: list[bool] = []

    def count_step(saves: Any, *micro: Any, **notes: Any) -> None:
        if not counting and dist.get_rank() == argument["victim"]:
            counting.append(True)
            kill_at_operation(argument["nth"])
        plain(saves, *micro, **notes)

    Saves.count_step = count_step
    train(argument)


def train_with_a_save_due_after_each_step(argument: dict[str, Any]) -> None:
    """The interval of `save_every` is over whenever rank 0 looks."""
    stopping.SaveTimer.is_due = True
    train({**argument, "keep": 100})


def choose_on_a_sick_host(argument: dict[str, Any]) -> None:
    """One rank cannot read what the others can."""
    resume.PAUSES_S = ()

    def read_manifest(checkpoint: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), checkpoint)

    with hpcddp.init() as group:
        if group.rank == argument["sick"]:
            files.read_manifest = read_manifest
        resume.choose_newest(group, Path(argument["folder"]), "")


def train_on_a_full_disk(argument: dict[str, Any]) -> None:
    """From step 2 on, no file may grow over a few hundred bytes on rank 1."""
    plain = Saves.count_step

    def count_step(saves: Any, *micro: Any, **notes: Any) -> None:
        if saves.steps == 2 and dist.get_rank() == argument["rank"]:
            saves.checkpointer.poll(wait=True)  # step 2's is whole
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (argument["bytes"], resource.RLIM_INFINITY))
        plain(saves, *micro, **notes)

    Saves.count_step = count_step
    train(argument)


def wrap_wrongly(cases: list[str]) -> None:
    """Each case ends in a RequestError; rank 0 prints them."""
    told = []
    for case in cases:
        with hpcddp.init() as group:
            try:
                _wrap_wrongly(case, group)
            except RequestError as error:
                told.append(f"{case}: {error.message} | {error.hint}")
    if group.is_first:
        print("\n".join(told))


def _wrap_wrongly(case: str, group: Group) -> None:
    model = make_model()
    hosts = [f"node{member.rank // 2}" for member in group.members]  # 2 on the first, 1 on the second
    members = tuple(member._replace(host=host) for member, host in zip(group.members, hosts, strict=True))
    group = dataclasses.replace(group, members=members)
    with hpcddp.runtime(
        9,
        group=group,
        parallel={"unknown": "fsdb", "uneven": "hsdp", "too many": {"shard": 2}}.get(case, "fsdp"),
        exact="integer" if case == "exact" else False,
    ) as rt:
        if case == "optimizer first":
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            rt.track(model=rt.wrap(model), optimizer=optimizer)
        elif case == "evaluation":
            rt.wrap(model)
            next(iter(rt.evaluation_loader(make_data(), batch_size=1)))
        elif case == "single number":
            model.scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
            rt.wrap(model)
        else:
            rt.wrap(model, blocks=nn.Conv2d if case == "no blocks" else None)


def evaluate_sharded(folder: str) -> None:
    """What the ranks of a sharded model see of the data, and whether they get the same sum as the whole model."""
    with hpcddp.runtime(8, parallel="fsdp") as rt:
        whole = make_model().to(rt.device)
        model = rt.wrap(make_model(), blocks=Block)
        held_out = rt.evaluation_loader(make_data(), batch_size=12)
        total, seen = torch.zeros((), dtype=torch.float64), []
        with torch.no_grad():
            for x, _, numbers in held_out:
                total += model(x).square().sum()
                seen += numbers.tolist()
            expected = whole(make_data().tensors[0]).square().sum()
            found = float(rt.sum(total))
        Path(folder, f"{rt.group.rank}.json").write_text(json.dumps([len(held_out), seen, found, float(expected)]))


def average_some(folder: str) -> None:
    """Each rank writes its buffers after averaging."""
    with hpcddp.runtime(3) as rt:
        rank = rt.group.rank
        model = nn.Module()
        model.register_buffer("alike", torch.tensor([0.1, 1e308, 0.7], dtype=torch.float64))
        model.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
        model.register_buffer("count", torch.tensor(rank))
        model.register_buffer("own", torch.tensor([float(rank), 5.0]))
        average_buffers(model, rt.layout)
        found = {name: buffer.tolist() for name, buffer in model.named_buffers()}
        Path(folder, f"{rank}.json").write_text(json.dumps(found))
