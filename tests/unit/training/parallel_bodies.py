"""What the ranks of the tests of splits run: the loop of the manual, however the model is split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import torch
from checkpoint_bodies import CLASSES, FEATURES, make_data
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import hpcddp
from hpcddp.errors import RequestError

HIDDEN = 8


def make_model() -> nn.Module:
    torch.manual_seed(3)
    first = [nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Dropout(0.0), nn.Linear(HIDDEN, HIDDEN)]
    model = nn.Sequential(*first, nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, CLASSES)).double()
    model.tensor_plan = {"0": "colwise", "3": "rowwise"}  # the last two are whole on each rank
    return model


class Layer(nn.Module):
    """An attention whose parent computes with the weights of a part that is never called, and a divided pair."""

    def __init__(self) -> None:
        super().__init__()
        # no bias: that of the keys has no gradient but rounding, which Adam makes large
        self.attention = nn.MultiheadAttention(4, 2, bias=False, batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.up, self.down = nn.Linear(4, HIDDEN), nn.Linear(HIDDEN, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Attentive(nn.Module):
    """Two layers, as blocks."""

    tensor_plan: ClassVar = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(FEATURES, 8)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.end = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x).view(len(x), 2, 4)
        for layer in self.layers:
            x = layer(x)
        return self.end(x.reshape(len(x), 8))


class Shrinking(torch.optim.AdamW):
    """Another class's step, and something of its own with each parameter and its state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter in self.state:
                parameter.sub_(0.01 * self.state[parameter]["exp_avg"]).mul_(0.9)
        return loss


def make_attentive() -> nn.Module:
    torch.manual_seed(3)
    return Attentive().double()


def train_all(arguments: list[dict[str, Any]]) -> None:
    """One training after the other, in the same processes."""
    for argument in arguments:
        train(argument)


def train(argument: dict[str, Any]) -> None:
    """Rank 0 writes the whole weights after each step, the norms that were clipped, and the evaluation's sum."""
    weights, norms, total = [], [], None
    with hpcddp.runtime(
        argument.get("global_batch", 10),
        seed=5,
        max_micro_batch=argument.get("max_micro_batch"),
        parallel=argument.get("parallel"),
        run_dir=argument.get("run_dir"),
        checkpoint=argument.get("checkpoint"),
        exact="integer" if argument.get("exact") else False,
    ) as rt:
        model = make_attentive() if argument.get("attentive") else make_model()
        if argument.get("attentive"):
            model = rt.wrap(model, blocks=Layer)
        optimizer = (Shrinking if argument.get("subclass") else torch.optim.AdamW)(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        objects = [model, optimizer, scheduler]
        objects += [torch.amp.GradScaler("cpu", init_scale=2.0)] if argument.get("scaler") else []
        data = DataLoader(make_data(), 16, shuffle=True), DataLoader(make_data(), 8)
        model, optimizer, scheduler, *scalers, loader, test = rt.prepare(*objects, *data)
        scaler = scalers[0] if scalers else None
        for _epoch in rt.epochs(argument.get("epochs", 2)):
            for batch in loader:
                optimizer.zero_grad()
                for x, y, _ in rt.micro_batches(batch):
                    factor = torch.inf if rt.steps == argument.get("overflow_at") else 1.0
                    rt.backward(factor * cross_entropy(model(x), y), scaler=scaler)
                if scaler is not None:
                    scaler.unscale_(optimizer)
                norms.append(float(_whole(nn.utils.clip_grad_norm_(model.parameters(), 0.1))))
                if scaler is not None:
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    optimizer.step()
                scheduler.step()
                weights.append([_whole(parameter) for parameter in rt.unwrap(model).parameters()])
                if rt.steps + 1 == argument.get("stop_at"):
                    rt.stop("the test's")
        with torch.no_grad():
            total = rt.sum(sum((cross_entropy(model(x), y, reduction="sum") for x, y, _ in test), torch.tensor(0.0)))
        rt.save_model(f"{argument['out']}.pt")
    if rt.group.is_first:
        states = sum(len(state) > 0 for state in optimizer.state.values())
        result = {
            "states": states,
            "sha256": rt.weights_sha256,
            "weights": weights,
            "norms": norms,
            "total": None if total is None else float(total),
            "steps": rt.steps,
        }
        torch.save(result, argument["out"])
        if rt.stop_reason is None:
            assert Path(f"{argument['out']}.pt").exists()


def _whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


OTHERS: dict[str, Any] = {"exact": {"tensor": 2}, "LBFGS": "zero1"}


def divide_wrongly(cases: list[str]) -> None:
    """Each case ends in a RequestError, which rank 0 prints."""
    for case in cases:
        with hpcddp.init() as group:
            try:
                parallel = OTHERS.get(case, {"shard": 1, "tensor": 2})
                with hpcddp.runtime(4, parallel=parallel, group=group, exact=case == "exact") as rt:
                    layers = [nn.Linear(4, 3 if case == "rows" else 4), nn.Linear(3 if case == "rows" else 4, 4)]
                    model = nn.Sequential(*layers)
                    if case == "tied":
                        model[1].weight = model[0].weight
                    plan = {"name": {"up": "colwise"}, "style": {"0": "columns"}, "none": None}
                    if case == "LBFGS":
                        rt.track(model=rt.wrap(model), optimizer=torch.optim.LBFGS(model.parameters()))
                    rt.wrap(model, tensor_plan=plan.get(case, {"0": "colwise"}))
            except RequestError as error:
                if group.is_first:
                    print(f"{case}: {error.message} | {error.hint}")


def choose(folder: str) -> None:
    """Whether a model is sharded: as the job file says (HPCDDP_PARALLEL), and as the program itself says."""
    sharded = []
    for parallel in (None, "ddp", {"data": 1, "shard": -1}):
        with hpcddp.runtime(4, parallel=parallel) as rt:
            [first, *_] = rt.wrap(nn.Linear(4, 4)).parameters()
            sharded.append(hasattr(first, "full_tensor"))
    Path(folder, f"{rt.group.rank}.json").write_text(json.dumps(sharded))
