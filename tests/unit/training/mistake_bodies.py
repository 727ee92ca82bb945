"""Mistakes that two ranks can make, and loops that only look like them: each row is a function of a runtime's opener.

The ranks of one group run one row after the other. Each row has a runtime of its own in the group.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import hpcddp
from hpcddp.errors import HpcddpError
from hpcddp.training import mistakes
from hpcddp.training.mistakes import Mistake

Opened = Callable[..., Any]  # hpcddp.runtime in the ranks' group
Body = Callable[[Opened, int], object]
SPLIT: dict[str, Any] = {"max_micro_batch": 1}
EXACT: dict[str, Any] = {"exact": True, "slices": 2}
MODES: tuple[dict[str, Any], ...] = ({}, SPLIT, EXACT)
WITH_DDP = MODES[:2]  # exact mode sums without it, whatever is called
SEQUENTIAL = "Sequential"


def make_data(samples: int = 12) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(samples, 4, generator=generator), torch.arange(samples) % 3)


def make_model(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1} | options)


class TwoHeads(nn.Module):
    """Two layers; the second one is used on request."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor, *, both: bool = False) -> Any:
        return (self.first(x), self.second(x)) if both else self.first(x)


def nothing(_p: Any) -> None: ...


def fit(
    open_: Opened,
    _rank: int,
    *,
    make: Callable[[], nn.Module] = make_model,
    data: Dataset[Any] | None = None,
    reads: dict[str, Any] | None = None,
    wraps: dict[str, Any] | None = None,
    lr: float = 0.1,
    epochs: int = 1,
    more: Sequence[Any] = (),
    prepared: Callable[[Any], object] = nothing,
    call: Callable[[Any], Any] = lambda p: p.net,
    before: Callable[[Any], object] = nothing,
    step: Callable[[Any], object] = lambda p: p.optimizer.step(),
    tail: Callable[[Any], object] = nothing,
    end: Callable[[Any], object] = nothing,
    **options: Any,
) -> None:
    """A right loop, but for what the hooks do: behind `rt.prepare`, before a batch, in place of a step, behind an
    epoch's batches, and behind the loop. `call` gives what is called; `reads` and `wraps` are options of the DataLoader
    and of `rt.wrap`."""
    with open_(**options) as rt:
        p = SimpleNamespace(rt=rt, rank=rt.rank, model=make(), epoch=0)
        optimizer = sgd(p.model, lr=lr)
        net = p.model if wraps is None else rt.wrap(p.model, **wraps)
        loader = DataLoader(make_data() if data is None else data, **{"batch_size": 4} | (reads or {}))
        p.net, *p.more, p.optimizer, p.loader = rt.prepare(net, *more, optimizer, loader)
        prepared(p)
        called = call(p)
        for p.epoch in rt.epochs(epochs):
            for batch in p.loader:
                before(p)
                p.optimizer.zero_grad()
                for x, y in rt.micro_batches(batch):
                    rt.backward(cross_entropy(called(x), y))
                step(p)
            tail(p)
        end(p)


def on_rank(rank: int, act: Callable[[Any], object]) -> Callable[[Any], None]:
    def hook(p: Any) -> None:
        if p.rank == rank:
            act(p)

    return hook


def in_plain_loop(body: Callable[[Any, Any, Any], object], **options: Any) -> Body:
    """`body(p, x, y)` does all of a step but `zero_grad`."""

    def run(open_: Opened, _rank: int) -> None:
        with open_(**options) as rt:
            p = SimpleNamespace(rt=rt, model=make_model())
            p.net, p.optimizer, loader = rt.prepare(p.model, sgd(p.model), DataLoader(make_data(), batch_size=4))
            for _ in rt.epochs(1):
                for x, y in loader:
                    p.optimizer.zero_grad()
                    body(p, x, y)

    return run


def two_forwards_then_two_backwards(p: Any, x: Tensor, y: Tensor) -> None:
    first, second = cross_entropy(p.net(x), y), p.net(2 * x).square().mean()
    p.rt.backward(first)
    p.rt.backward(second)
    p.optimizer.step()


def backward_in_no_sync(p: Any, x: Tensor, y: Tensor) -> None:
    with p.net.no_sync():
        p.rt.backward(cross_entropy(p.net(x), y))
        p.optimizer.step()


def first_of_two_in_no_sync(p: Any, x: Tensor, y: Tensor) -> None:
    """Right: the next backward pass averages the gradients of both."""
    with p.net.no_sync():
        p.rt.backward(cross_entropy(p.net(x), y))
    p.rt.backward(cross_entropy(p.net(-x), y))
    p.optimizer.step()


def freeze(*epochs: int) -> Callable[[Any], None]:
    """The first layer, in these epochs."""
    return lambda p: p.model[0].requires_grad_(p.epoch not in epochs)


def make_frozen() -> nn.Module:
    model = make_model()
    model[0].requires_grad_(False)
    return model


def two_loaders(open_: Opened, _rank: int, count: Any = None) -> None:
    with open_() as rt:
        model = make_model()
        first, second = (DataLoader(make_data(), batch_size=size, shuffle=True) for size in (3, 4))
        loader = rt.loader(first, count=count)
        net, optimizer, more = rt.prepare(model, sgd(model), second)
        for _ in rt.epochs(1):
            for (x, y), (u, v) in zip(loader, more, strict=False):
                optimizer.zero_grad()
                rt.backward(cross_entropy(net(torch.cat([x, u])), torch.cat([y, v])))
                optimizer.step()


ROWS: dict[str, tuple[Body, Mistake, dict[str, Any]]] = {
    **{
        f"the model from before prepare is called, {options}": (
            partial(fit, call=lambda p: p.model, **options),
            mistakes.MODEL_UNWRAPPED,
            {"kind": SEQUENTIAL},
        )
        for options in ({}, SPLIT)
    },
    "two forward passes, then two backward passes": (
        in_plain_loop(two_forwards_then_two_backwards),
        mistakes.MODEL_TWICE,
        {"kind": SEQUENTIAL},
    ),
    **{
        f"an unused layer, {options}": (
            partial(fit, make=TwoHeads, **options),
            mistakes.LAYER_UNUSED,
            {"kind": "TwoHeads", "name": "second.weight has no gradient"},
        )
        for options in ({}, SPLIT)
    },
    "shares that are not in proportion": (
        two_loaders,
        mistakes.SHARES_DIFFER,
        {"first": 3, "second": 4, "number": 2, "ranks": 2},
    ),
    "a count of one of two loaders": (
        partial(two_loaders, count=lambda batch: len(batch[0])),
        mistakes.SHARES_DIFFER,
        {"first": 3, "second": 4, "number": 2, "ranks": 2},
    ),
    "a layer is unfrozen": (
        partial(fit, make=make_frozen, epochs=2, before=freeze(0)),
        mistakes.LAYER_UNFROZEN,
        {"name": "0.weight of Sequential"},
    ),
    "a layer is frozen": (
        partial(fit, epochs=2, before=freeze(1)),
        mistakes.LAYER_UNUSED,
        {"name": "0.weight requires none any more", "kind": SEQUENTIAL},
    ),
}


# ---- what the ranks do not do alike


def step_and(act: Callable[[Any], object]) -> Callable[[Any], None]:
    def step(p: Any) -> None:
        p.optimizer.step()
        act(p)

    return step


@torch.no_grad()
def clamp_a_bias(p: Any) -> None:
    p.model[2].bias.clamp_(max=-1.0)


def lose_the_weights(p: Any) -> None:
    p.optimizer.step()
    if p.rt.steps >= 2:
        nn.init.constant_(p.model[0].weight, torch.nan)


def evaluate_on_rank_0(open_: Opened, rank: int, **options: Any) -> None:
    with open_(**options) as rt:
        model = make_model()
        test = DataLoader(make_data(), batch_size=3)
        net, optimizer, loader, test = rt.prepare(model, sgd(model), DataLoader(make_data(), batch_size=4), test)
        for _ in rt.epochs(1):
            for x, y in loader:
                optimizer.zero_grad()
                rt.backward(cross_entropy(net(x), y))
                optimizer.step()
        if rank == 0:
            assert sum(len(x) for x, _ in test) == 6


def evaluate_with(open_: Opened, _rank: int, data: Dataset[Any], batch_size: int = 4) -> None:
    with open_() as rt:
        rt.prepare(DataLoader(make_data(), 4), DataLoader(data, batch_size))
        next(iter(rt.epochs(1)))


def by_rank(make: Callable[[int], Body]) -> Body:
    """What each rank does is not known before it is one."""
    return lambda open_, rank: make(rank)(open_, rank)


def parts(rank: int) -> Subset[Any]:
    return Subset(make_data(24), range(12 * rank, 12 * rank + 12))


#: what rank 0 gives to hpcddp.runtime, rank 1, and what is said
OPTIONS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"seed": 42}, {"seed": 43}, "seed=42 on rank 0, seed=43 on rank 1\nhint: hpcddp.runtime(…, seed=42) on every"),
    ({"exact": True}, {}, "exact=True on rank 0, exact=False on rank 1"),
    ({"save_every": 2}, {}, "save_every=2 on rank 0, save_every=None on rank 1"),
]
READS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"shuffle": True}, {}, "shuffle=True on rank 0, shuffle=False on rank 1\nhint: DataLoader(…, shuffle=True) on ev"),
    ({}, {"drop_last": True}, "drop_last=False on rank 0, drop_last=True on rank 1"),
]
OF_RANK_0 = "the weights of rank 1 are not those of rank 0"
SAID: dict[str, tuple[Body, str]] = {
    "a backward pass in no_sync": (in_plain_loop(backward_in_no_sync), f"after step 1 {OF_RANK_0}"),
    "weights loaded on one rank": (
        partial(fit, prepared=on_rank(1, lambda p: p.model.load_state_dict(make_model(9).state_dict()))),
        f"after step 1 {OF_RANK_0}: 0.weight of Sequential",
    ),
    "weights changed on one rank in a step": (
        partial(fit, step=step_and(on_rank(1, clamp_a_bias))),
        "of rank 0: 2.bias of Sequential differs by up to",
    ),
    "weights changed on one rank after the last step": (
        partial(
            fit, run_dir="tail", epochs=2, tail=on_rank(0, lambda p: p.epoch and nn.init.zeros_(p.model[0].weight))
        ),
        f"after step 6 {OF_RANK_0}: 0.weight",
    ),
    "another learning rate on each rank": (by_rank(lambda rank: partial(fit, lr=0.1 * (1 + rank))), OF_RANK_0),
    "weights that are no numbers": (
        partial(fit, epochs=2, step=lose_the_weights),
        "after step 6 the weights are no numbers any more: 0.weight of Sequential has NaN",
    ),
    "an average updated on one rank": (
        partial(
            fit,
            more=[AveragedModel(make_model())],
            step=step_and(on_rank(0, lambda p: p.more[0].update_parameters(p.model))),
        ),
        "module.0.weight of AveragedModel differs by",
    ),
    "an evaluation on one rank": (
        evaluate_on_rank_0,
        "by step 3 one rank went 1 time over evaluation data, and another 0\nhint: evaluate",
    ),
    "an evaluation on one rank after the last checkpoint": (
        partial(evaluate_on_rank_0, run_dir="evaluated"),
        "an evaluation ran on some ranks only, and each rank sees",
    ),
    "a data set that is cut by rank": (
        by_rank(lambda rank: partial(fit, data=make_data(11 + rank))),
        "rank 1 gets other samples of this TensorDataset than rank 0: it has 12, and rank 0 has 11",
    ),
    "other samples by rank": (
        by_rank(lambda rank: partial(fit, data=parts(rank))),
        "rank 1 gets other samples of this Subset than rank 0",
    ),
    "another batch size of evaluation": (
        by_rank(lambda rank: partial(evaluate_with, data=make_data(), batch_size=4 + 2 * rank)),
        "batch_size=4 on rank 0, batch_size=6 on rank 1\nhint: evaluation data: the same DataLoader(…, batch_size=4),",
    ),
    "evaluation data that are cut by rank": (
        by_rank(lambda rank: partial(evaluate_with, data=parts(rank))),
        "the ranks were given different options: subset='",
    ),
    "a sum of other lengths": (
        partial(fit, tail=lambda p: p.rt.sum(torch.ones(2 + p.rank))),
        "rt.sum got another shape on each rank",
    ),
    **{
        f"options: {words}": (by_rank(lambda rank, some=some: partial(fit, **some[rank])), words)
        for *some, words in OPTIONS
    },
    **{
        f"reading: {words}": (by_rank(lambda rank, some=some: partial(fit, reads=some[rank])), words)
        for *some, words in READS
    },
}


# ---- what is right, and must not be refused


class Noisy(Dataset[Any]):
    """Draws random numbers of its own, on each rank others, and rounds on each rank otherwise."""

    def __init__(self, rank: int, *, draws: bool) -> None:
        self._data, self._rank, self._draws = make_data(), rank, draws
        self._own = random.Random(rank)

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self._data[index]
        return x + (self._own.random() if self._draws else 1e-6 * self._rank), y


def teach_a_frozen_layer(open_: Opened, _rank: int) -> None:
    """A teacher that holds a layer of the model; a group of what the model had from the start is added later."""
    with open_() as rt:
        model = make_frozen()
        teacher = nn.Sequential(model[0])
        net, _, optimizer, loader = rt.prepare(model, teacher, sgd(model[0]), DataLoader(make_data(), batch_size=4))
        optimizer.add_param_group({"params": list(model[2].parameters())})
        for _ in rt.epochs(2):
            for x, y in loader:
                optimizer.zero_grad()
                rt.backward(cross_entropy(net(x), y))
                optimizer.step()


def leave_evaluations(open_: Opened, rank: int) -> None:
    """Evaluations that are left at another batch on each rank, and a look at one batch."""
    with open_() as rt:
        model = make_model()
        net, optimizer, loader, test = rt.prepare(
            model, sgd(model), DataLoader(make_data(), batch_size=4), DataLoader(make_data(), batch_size=3)
        )
        for _ in rt.epochs(2):
            if rt.is_main:
                next(iter(test))
            for x, y in loader:
                optimizer.zero_grad()
                rt.backward(cross_entropy(net(x), y))
                optimizer.step()
            for n, _ in enumerate(test):
                rt.save()
                if n == 1 or rank == 1:
                    break
        for _ in test:
            rt.save()


def look_on_one_rank(p: Any) -> None:
    """An evaluation loader of rank 0 alone, of which it takes a batch."""
    if p.rank == 0:
        next(iter(p.rt.evaluation_loader(make_data(5), 2)))


def cut_the_model(p: Any) -> None:
    del p.model[2]


def ask_on_one_rank(open_: Opened, rank: int) -> None:
    """After the batches of an epoch one rank's request ends the loop of all, as of rank 0, which has the accuracy."""
    for nth, how in enumerate(("stop", "finish_early")):
        seen: list[Any] = []

        def tail(p: Any, nth: int = nth, how: str = how, seen: list[Any] = seen) -> None:
            seen[:] = [p.rt, p.epoch]
            if rank == nth:
                getattr(p.rt, how)("good enough")

        fit(open_, rank, epochs=3, tail=tail)
        rt, epoch = seen
        assert (epoch, rt.steps, rt.stop_reason) == (0, 3, "good enough" if how == "stop" else None)


RIGHT: dict[str, Body] = {
    **{f"a right loop, {options}": partial(fit, epochs=2, **options) for options in MODES},
    "a compiled model": partial(fit, call=lambda p: torch.compile(p.net, backend="eager"), epochs=2),
    "data that draw": by_rank(lambda rank: partial(fit, data=Noisy(rank, draws=True))),
    "data that round": by_rank(lambda rank: partial(fit, data=Noisy(rank, draws=False))),
    **{
        f"an unused layer that DDP looks for, {options}": partial(
            fit, make=TwoHeads, wraps={"find_unused_parameters": True}, **options
        )
        for options in MODES
    },
    # exact mode uses no DDP
    "exact, the model from before prepare is called": partial(fit, call=lambda p: p.model, **EXACT),
    "exact, an unused layer": partial(fit, make=TwoHeads, **EXACT),
    "exact, a layer is frozen": partial(fit, epochs=2, before=freeze(1), **EXACT),
    "an average": partial(
        fit, more=[AveragedModel(make_model())], step=step_and(lambda p: p.more[0].update_parameters(p.model))
    ),
    "all ranks skip a step": partial(fit, step=lambda p: p.rt.steps != 1 and p.optimizer.step()),
    "a teacher that holds a layer": teach_a_frozen_layer,
    "evaluations that are left": leave_evaluations,
    "evaluation loaders of one rank": partial(
        fit, epochs=2, prepared=look_on_one_rank, before=look_on_one_rank, tail=look_on_one_rank
    ),
    "a first pass in no_sync": in_plain_loop(first_of_two_in_no_sync),
    # for a file of rank 0's
    "an export": partial(fit, run_dir="exported", end=on_rank(0, lambda p: p.model.half())),
    "a cut model": partial(fit, end=on_rank(0, cut_the_model)),
    # options that only rank 0 uses, and a batch_size that says nothing beside both numbers that it would say
    "options of one rank": by_rank(
        lambda rank: partial(
            fit,
            reads={"batch_size": 4 + 2 * rank, "num_workers": rank},
            keep_checkpoints=2 + rank,
            log_to=[],
            global_batch=4,
            max_micro_batch=2,
            timeout_s=600.0 + rank,
        )
    ),
    "what one rank asks for": ask_on_one_rank,
}
BODIES: dict[str, Body] = {name: body for name, (body, *_) in (*ROWS.items(), *SAID.items())} | RIGHT


def run_all(folder: str) -> None:
    """Each rank writes what became of each row: the error's two lines, or that there was none."""
    os.chdir(folder)
    said: dict[str, str] = {}
    with hpcddp.init() as group:

        def opened(**options: Any) -> Any:
            return hpcddp.runtime(**{"group": group} | options)

        for name, body in BODIES.items():
            try:
                body(opened, group.rank)
                said[name] = ""
            except HpcddpError as error:
                said[name] = f"{error}"
    Path(folder, f"{group.rank}.json").write_text(json.dumps(said))
