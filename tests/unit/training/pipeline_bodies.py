"""What the ranks of the tests of pipelines run: one loop, whether a model is cut into stages or not."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import torch
from checkpoint_bodies import CLASSES, FEATURES, make_data
from parallel_bodies import Layer, _whole, make_model
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import hpcddp
from hpcddp.errors import RequestError


class Chain(nn.Module):
    """A forward pass of its own: a parameter and a buffer of the root, a mask that every layer takes, a recomputed
    layer, and a tuple as output."""

    tensor_plan: ClassVar = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(FEATURES, 8)
        self.shift = nn.Parameter(torch.randn(8))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8))
        self.layers = nn.ModuleList([Layer() for _ in range(4)])
        self.end = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        mask = (x.mean(1) > -9).double()[:, None, None] * self.scale.view(1, 2, 4)
        x = (self.start(x) * self.shift).view(len(x), 2, 4)
        for nth, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=False) if nth == 1 else layer(x)
            x = x * mask
        return self.end(x.reshape(len(x), 8)), len(self.layers)


def make_chain() -> nn.Module:
    torch.manual_seed(3)
    return Chain().double()


# how to make it, and where the stages of a pipeline of 2 and of 4 begin
MODELS = {
    "layers": (make_model, ["4"], ["3", "4", "5"]),
    "chain": (make_chain, ["layers.2"], ["layers.1", "layers.2", "end"]),
}


def train_all(arguments: list[dict[str, Any]]) -> None:
    """One training after the other, in the same processes."""
    for argument in arguments:
        train(argument)


def train(argument: dict[str, Any]) -> None:
    """Rank 0 writes the norms that were clipped, the losses, the evaluation's sum and the saved weights."""
    norms, losses, total = [], [], None
    parallel = argument.get("parallel", "ddp")
    # each part of a stage is sharded on its own; nothing here changes its output in place
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    make, *stages = MODELS[argument.get("model", "layers")]
    with hpcddp.runtime(
        argument.get("global_batch", 10),
        seed=5,
        max_micro_batch=argument.get("max_micro_batch", 2),
        parallel=parallel,
        run_dir=argument.get("run_dir"),
        checkpoint=argument.get("checkpoint"),
    ) as rt:
        model = make()
        if not isinstance(parallel, str):
            count = parallel["pipeline"]
            if argument.get("before"):  # the optimizer has all parameters, and prepare takes those of the stage
                model.pipeline_stages = stages[count > 2]
            else:
                blocks = {"blocks": Layer} if isinstance(model, Chain) and "shard" in parallel else {}
                model = rt.wrap(model, stages=stages[count > 2], schedule=argument.get("schedule"), **blocks)
        groups = [[p for p in model.parameters() if (p.dim() > 1) == whole] for whole in (True, False)]
        optimizer = torch.optim.AdamW(
            [{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}],
            lr=0.05,
            foreach=argument.get("foreach"),
        )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        counted = (lambda batch: float((batch[1] != 0).sum())) if argument.get("count") else None
        loader = rt.loader(DataLoader(make_data(), 16, shuffle=True), count=counted)
        model, optimizer, scheduler = rt.prepare(model, optimizer, scheduler)
        test = rt.evaluation_loader(make_data(), 4)

        def output(x: torch.Tensor) -> torch.Tensor:
            out = model(x)
            return out[0] if isinstance(out, tuple) else out

        def loss_of(batch: Any) -> torch.Tensor:
            x, y, _ = batch
            return cross_entropy(output(x), y, ignore_index=0 if counted else -100)

        for _epoch in rt.epochs(argument.get("epochs", 2)):
            for step in loader.steps():
                optimizer.zero_grad()
                losses.append(float(rt.sum(rt.train_step(step, loss_of).sum())))
                if argument.get("by_hand", True):
                    norms.append(float(_whole(nn.utils.clip_grad_norm_(model.parameters(), 0.1))))
                    optimizer.step()
                    scheduler.step()
                else:
                    rt.step(optimizer, scheduler=scheduler, clip_norm=0.1)
                if rt.steps + 1 == argument.get("stop_at"):
                    rt.stop("the test's")
            with torch.no_grad():
                sums = [cross_entropy(output(x), y, reduction="sum") for x, y, _ in test]
            total = rt.sum(sum(sums, torch.tensor(0.0)))
        rt.save_model(f"{argument['out']}.pt")
    if rt.group.is_first:
        result = {"norms": norms, "losses": losses, "total": None if total is None else float(total), "steps": rt.steps}
        torch.save(result, argument["out"])


class Crossing(nn.Module):
    """Its forward pass takes what the first layer gives once more at the end, or calls things otherwise."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        self.first, self.second, self.third = (nn.Linear(FEATURES, FEATURES) for _ in range(3))
        if case == "tied":
            self.third.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.first(x)
        if self.case == "numbers" and bool(a.sum() > 0):
            a = -a
        if self.case == "order":
            return self.first(self.second(x))
        return self.third(self.second(a) + a) if self.case == "skip" else self.third(self.second(a))


_STAGES = {"none": None, "name": ["secnd"], "count": ["second", "third"], "untrained": ["1"]}


def cut_wrongly(cases: list[str]) -> None:
    """Each case ends in a RequestError, on both ranks or on the only one that finds it, which prints it."""
    for case in cases:
        with hpcddp.init() as group:
            try:
                _cut(case, group)
            except RequestError as error:
                print(f"{case}: {error.message} | {error.hint}", flush=True)
                if len(cases) == 1:
                    raise


def _cut(case: str, group: Any) -> None:
    parallel: Any = "ddp" if case == "ddp" else {"pipeline": 2}
    with hpcddp.runtime(8, parallel=parallel, group=group, exact=case == "exact") as rt:
        model = Crossing(case).double()
        if case == "untrained":
            model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh())
        average = AveragedModel(model) if case == "average" else None
        schedule = "zigzag" if case == "schedule" else None
        model = rt.wrap(model, stages=_STAGES.get(case, ["second"]), schedule=schedule)
        if case == "second":
            rt.wrap(Crossing(case))
        kind = torch.optim.LBFGS if case == "lbfgs" else torch.optim.SGD
        more = [torch.amp.GradScaler("cpu")] if case == "scaler" else [] if average is None else [average]
        optimizer = kind(model.parameters(), lr=0.1)
        _, _, loader, *_ = rt.prepare(model, optimizer, DataLoader(make_data(), 2), *more)

        def loss_of(batch: Any) -> torch.Tensor:
            x, y, _ = batch
            if case == "no call":
                return x.sum()
            out = model(x) + (model(x) if case == "twice" else 0)
            penalty = model.first.weight @ model.first.weight if case == "penalty" else torch.zeros(5, 5)
            return cross_entropy(out, y) + penalty.sum()

        if case == "ordinary":
            for x, y, _ in loader:
                rt.backward(cross_entropy(model(x), y))
        for step in loader.steps():
            rt.train_step(step, loss_of)
            optimizer.step()
            optimizer.zero_grad()


def draw(argument: dict[str, Any]) -> None:
    """Dropout in each stage, and numbers that `loss_of` draws for the first and the last of them."""
    with hpcddp.runtime(8, parallel={"pipeline": 2}, seed=3, max_micro_batch=4) as rt:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(FEATURES, 64), nn.Dropout(0.5), nn.Linear(64, 64), nn.Dropout(0.5)).double()
        seen: dict[str, list[torch.Tensor]] = {"noise": [], "mask": []}
        own = [1, 3][rt.group.rank]
        model[own].register_forward_hook(lambda _, inputs, output: seen["mask"].append(output.detach() == 0))
        model = rt.wrap(model, stages=["2"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model, optimizer = rt.prepare(model, optimizer)
        loader = rt.loader(make_data(), shuffle=False)

        def loss_of(batch: Any) -> torch.Tensor:
            seen["noise"].append(torch.randn(3))
            return model(batch[0]).mean()

        for step in loader.steps():
            rt.train_step(step, loss_of)
            optimizer.step()
            optimizer.zero_grad()
            break
    torch.save(seen, f"{argument['out']}-{rt.group.rank}")
