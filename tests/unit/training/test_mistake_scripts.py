"""A right script, and what goes wrong if a line of it is another: none ends with status 0 and a wrong result.

Each mistake is a change of the script's text; the changed script runs on two ranks as it stands.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RunRanks = Callable[..., Any]

# one of each kind that no other fast test has
FAST = ("a copy of the model is called", "one of two optimizers is not prepared", "the scheduler is made after prepare")

RIGHT = """\
import copy
import os

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import (
    BatchSampler, DataLoader, DistributedSampler, RandomSampler, TensorDataset, WeightedRandomSampler
)

import hpcddp

rank = int(os.environ["RANK"])
torch.manual_seed(3)
data = TensorDataset(torch.randn(24, 4), torch.arange(24) % 3)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
scaler = torch.amp.GradScaler("cpu", enabled=False)
loader = DataLoader(data, batch_size=8, shuffle=True)
with hpcddp.runtime() as rt:
    net, optimizer, scheduler, scaler, batches = rt.prepare(model, optimizer, scheduler, scaler, loader)
    for epoch in rt.epochs(2):
        for batch in batches:
            optimizer.zero_grad()
            for x, y in rt.micro_batches(batch):
                loss = cross_entropy(net(x), y)
                rt.backward(loss)
            optimizer.step()
            scheduler.step()
"""

PREPARE = "    net, optimizer, scheduler, scaler, batches = rt.prepare(model, optimizer, scheduler, scaler, loader)\n"
LOADER = "loader = DataLoader(data, batch_size=8, shuffle=True)\n"
ZERO, STEP, NEXT = (
    "            optimizer.zero_grad()\n",
    "            optimizer.step()\n",
    "            scheduler.step()\n",
)
BACKWARD = "                rt.backward(loss)\n"
SPLIT = ("hpcddp.runtime()", "hpcddp.runtime(max_micro_batch=2)")
Changes = list[tuple[str, str]]

MISTAKES: dict[str, tuple[Changes, str]] = {
    "the model from before prepare is called": ([("net(x)", "model(x)")], "not through the model that rt.prepare"),
    "the module inside is called": ([("net(x)", "rt.unwrap(net)(x)")], "not through the model that rt.prepare"),
    "the same with accumulation": ([("net(x)", "model(x)"), SPLIT], "not through the model that rt.prepare"),
    "a copy of the model is called": (
        [("net(x)", "copy.deepcopy(model)(x)")],
        "SGD.step() came without a new rt.backward(loss)",
    ),
    "loss.backward()": ([("rt.backward(loss)", "loss.backward()")], "without a new rt.backward(loss)"),
    "no backward": ([(BACKWARD, "")], "without a new rt.backward(loss)"),
    "no backward and no step": ([(BACKWARD + STEP + NEXT, "")], "had no rt.backward(loss)"),
    "no step": ([(STEP + NEXT, "")], "6 batches had rt.backward(loss), and no optimizer of the run has stepped"),
    "no step, with accumulation": ([(STEP + NEXT, ""), SPLIT], "and no optimizer of the run has stepped"),
    "a step on rank 0 only": (
        [(STEP + NEXT, "            if rt.is_main:\n    " + STEP + "    " + NEXT)],
        "after step 1 the weights of rank 1 are not those of rank 0",
    ),
    "two steps": ([(STEP, STEP + STEP)], "without a new rt.backward(loss)"),
    "clipped in each micro batch": (
        [(BACKWARD, BACKWARD + "                nn.utils.clip_grad_norm_(net.parameters(), 0.1)\n"), SPLIT],
        "gradients were cleared or changed inside rt.micro_batches(batch)",
    ),
    "cleared in each micro batch": (
        [(ZERO, ""), (BACKWARD, "                optimizer.zero_grad()\n" + BACKWARD), SPLIT],
        "gradients were cleared or changed inside rt.micro_batches(batch)",
    ),
    "a step in each micro batch": (
        [(STEP, "    " + STEP), SPLIT],
        "SGD.step() came inside rt.micro_batches(batch)",
    ),
    "a micro batch is passed over": (
        [
            (
                BACKWARD,
                "                if not batches.sampler.position and len(seen) == 0:\n"
                "                    seen.append(1)\n                    continue\n" + BACKWARD,
            ),
            (ZERO, ZERO + "            seen = []\n"),
            SPLIT,
        ],
        "1 of the 2 micro batches of this batch had rt.backward(loss)",
    ),
    "the line for micro batches is missing": (
        [
            ("            for x, y in rt.micro_batches(batch):\n", "            x, y = batch\n"),
            ("                loss", "            loss"),
            (BACKWARD, BACKWARD[4:]),
            SPLIT,
        ],
        "this batch is several micro batches",
    ),
    "accumulated by hand": (
        [
            (STEP + NEXT, "            if rt.steps % 2:\n    " + STEP + "    " + NEXT),
            (ZERO, "            if rt.steps % 2 == 0:\n    " + ZERO),
        ],
        "with the gradients of an earlier batch still in the sum",
    ),
    "the optimizer of another model": (
        [("SGD(model.parameters()", "SGD(copy.deepcopy(model).parameters()")],
        "belong to no model that rt.prepare was given",
    ),
    "the optimizer is not prepared": (
        [(PREPARE, "    net, batches = rt.prepare(model, loader)\n")],
        "steps a prepared model, and was not prepared itself",
    ),
    "one of two optimizers is not prepared": (
        [
            ("SGD(model.parameters()", "SGD(model[0].parameters()"),
            (LOADER, LOADER + "other = torch.optim.SGD(model[2].parameters(), lr=0.1)\n"),
            (ZERO, ZERO + "            other.zero_grad()\n"),
            (STEP, STEP + "            other.step()\n"),
        ],
        "steps a prepared model, and was not prepared itself",
    ),
    "the scheduler is not prepared": (
        [(PREPARE, "    net, optimizer, batches = rt.prepare(model, optimizer, loader)\n")],
        "has a scheduler that was not prepared",
    ),
    "the scheduler is made after prepare": (
        [
            (PREPARE, "    net, optimizer, batches = rt.prepare(model, optimizer, loader)\n    scheduler = LATER\n"),
            ("scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)\n", ""),
            ("LATER", "torch.optim.lr_scheduler.StepLR(optimizer, 2)"),
        ],
        "has a scheduler that was not prepared",
    ),
    "the scaler is not prepared": (
        [
            ("optimizer, scheduler, scaler, batches", "optimizer, scheduler, batches"),
            ("optimizer, scheduler, scaler, loader", "optimizer, scheduler, loader"),
            ("enabled=False", "enabled=True"),
            (BACKWARD, "                rt.backward(loss, scaler=scaler)\n"),
        ],
        "the gradient scaler was not prepared",
    ),
    "the loader is not prepared": (
        [
            ("scaler, batches = rt", "scaler = rt"),
            ("scaler, loader)", "scaler)"),
            ("in batches", "in loader"),
            ("runtime()", "runtime(8)"),
        ],
        "this runtime has no training loader yet",
    ),
    "the loader from before prepare is looped over": (
        [("in batches", "in loader")],
        "outside the loop over the training loader",
    ),
    "a sampler with weights": (
        [("shuffle=True)\nwith", "sampler=WeightedRandomSampler([1.0] * 24, 24))\nwith")],
        "WeightedRandomSampler",
    ),
    "a sampler of batches": (
        [("batch_size=8, shuffle=True)\nwith", "batch_sampler=BatchSampler(RandomSampler(data), 8, True))\nwith")],
        "batch",
    ),
    "a distributed sampler with an order of its own": (
        [
            (
                "rank = int",
                "class Few(DistributedSampler):\n    def __iter__(self):\n        return iter([0, 1])\n\n\nrank = int",
            ),
            ("shuffle=True)\nwith", "sampler=Few(data, 2, rank))\nwith"),
        ],
        "a sampler of its own, Few",
    ),
    "a data set divided by rank": (
        [("DataLoader(data, ", "DataLoader(torch.utils.data.Subset(data, range(rank, 24, 3)), ")],
        "rank 1 gets other samples of this Subset",
    ),
    "the model is in DDP already": (
        [(PREPARE, PREPARE.replace("model,", "nn.parallel.DistributedDataParallel(model),", 1))],
        "the model is in DistributedDataParallel already",
    ),
    "another learning rate on each rank": ([("lr=0.1", "lr=0.1 * (1 + rank)")], "are not those of rank 0"),
    "weights loaded on rank 0 after prepare": (
        [(PREPARE, PREPARE + "    if rank == 0:\n        nn.init.zeros_(model[0].weight)\n")],
        "are not those of rank 0",
    ),
    "weights changed on rank 0 in the loop": (
        [(NEXT, NEXT + "            if rank == 0:\n                nn.init.zeros_(model[0].weight)\n")],
        "are not those of rank 0",
    ),
    "gradients clipped on rank 0": (
        [
            (BACKWARD, BACKWARD + "            if rank == 0:\n                nn.utils.clip_grad_norm_(SMALL)\n"),
            ("SMALL", "net.parameters(), 1e-3"),
        ],
        "are not those of rank 0",
    ),
    "another size of the model on each rank": ([("8)", "8 + rank)"), ("Linear(8,", "Linear(8 + rank,")], "rank"),
    "a learning rate at which the loss is lost": ([("lr=0.1", "lr=1e38")], "the loss of the run is inf by step 6"),
    "a loss that is detached": (
        [("rt.backward(loss)", "rt.backward(loss.detach())")],
        "the loss has no gradient: it was detached",
    ),
    "a forward pass without gradients": (
        [("                loss = ", "                with torch.no_grad():\n                    loss = ")],
        "the loss has no gradient: it was detached",
    ),
    "the step behind the loop": (
        [(STEP + NEXT, "        optimizer.step()\n"), (ZERO, "")],
        "with the gradients of an earlier batch still in the sum",
    ),
    "a loss that is no single number": (
        [("cross_entropy(net(x), y)", "cross_entropy(net(x), y, reduction='none')")],
        "hint: rt.backward(loss.mean())",
    ),
    "two models with a layer in common": (
        [
            ("    net, optimizer", "    net, other, optimizer"),
            ("rt.prepare(model,", "rt.prepare(model, nn.Sequential(model[0], nn.Linear(8, 1)),"),
        ],
        "0.weight of this Sequential is in another prepared model too",
    ),
    "an exit in the loop": (
        [(NEXT, NEXT + "            raise SystemExit(0)\n")],
        "left the `with` body by sys.exit() after step 0, and the run is not finished",
    ),
    "a method of the model inside": (
        [
            (
                "model = nn.Seq",
                "class Net(nn.Sequential):\n    def loss(self, x, y):\n        return LOSS\n\n\nmodel = nn.Seq",
            ),
            ("nn.Sequential(nn.Linear", "Net(nn.Linear"),
            ("cross_entropy(net(x), y)", "net.loss(x, y)"),
            ("LOSS", "cross_entropy(self(x), y)"),
        ],
        "has no attribute 'loss': the Net inside it has\nhint: rt.unwrap(model).loss",
    ),
    "a layer of the model inside": (
        [(PREPARE, PREPARE + "    print(net[0].weight)\n")],
        "object is not subscriptable)\nhint: rt.unwrap(model)",
    ),
    "no batch size": ([("batch_size=8, shuffle=True", "batch_size=None")], "batch_size"),
    "prepared twice": ([(PREPARE, PREPARE + PREPARE)], "already"),
}


def change(name: str) -> str:
    text, changes = RIGHT, MISTAKES[name][0]
    for old, new in changes:
        assert old in text, (name, old)
        text = text.replace(old, new)
    return text


def run_script(path: str) -> None:
    """On each rank, in a process of its own."""
    runpy.run_path(path, run_name="__main__")


@pytest.mark.slow
def test_the_right_script_ends_well_without_a_warning(run_ranks: RunRanks, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(RIGHT)
    for ranks in (1, 2):
        outcome = run_ranks("test_mistake_scripts:run_script", ranks, str(script)).check()
        assert "warning" not in "".join(outcome.outputs).lower()
        assert "finished after step 6" in outcome.outputs[0]


@pytest.mark.slow
def test_the_batch_size_beside_a_distributed_sampler_is_said_to_be_that_of_all_ranks(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    spread = RIGHT.replace(LOADER, "loader = DataLoader(data, 8, sampler=DistributedSampler(data, 2, rank))\n")
    for text, said in ((spread, True), (spread.replace("runtime()", "runtime(8)"), False)):
        script.write_text(text)
        outcome = run_ranks("test_mistake_scripts:run_script", 2, str(script)).check()
        assert ("is the global batch here, over all 2 ranks\nhint: hpcddp.runtime(16)" in outcome.outputs[0]) is said


def test_there_are_mistakes_enough() -> None:
    assert len(MISTAKES) >= 30


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in MISTAKES])
def test_no_mistake_ends_with_status_0(name: str, run_ranks: RunRanks, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(change(name))
    outcome = run_ranks("test_mistake_scripts:run_script", 2, str(script))
    assert all(status not in (0, None) for status in outcome.statuses), outcome.outputs
    assert MISTAKES[name][1] in "".join(outcome.outputs)
