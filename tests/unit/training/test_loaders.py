"""Two training loaders, loops over steps, batches that the script makes: as one process, on any ranks, over stops."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import hpcddp
from hpcddp.errors import RequestError
from hpcddp.training.data.items import read_items
from hpcddp.training.data.sampler import derive_key, permute

from . import loaders_bodies as bodies

RunRanks = Callable[..., Any]
Losses = Iterator[Callable[[nn.Module], Tensor]]

PAIRS = {
    "zip": {"how": "zip", "sizes": [6, 12]},
    "reversed": {"how": "reversed", "sizes": [6, 12]},
    "endless": {"how": "endless", "sizes": [6, 12]},
    "second ends first": {"how": "of", "sizes": [3, 12], "drop_last": False},  # 8 and 4 batches
    "shares out of proportion": {"how": "of", "sizes": [10, 22]},
    "micro batches": {"how": "micro", "sizes": [10, 22], "max_micro_batch": 3},
    "exact": {"how": "micro", "sizes": [10, 22], "exact": "integer", "slices": 4},
}
ITEMS = {
    "buckets": {"how": "buckets", "items": 3},
    "batches of the data set": {"how": "pieces", "items": 3},
    "exact buckets": {"how": "buckets", "items": 3, "exact": "integer", "slices": 3},
}


def _orders(samples: int, size: int, seed: int, epoch: int, *, drop_last: bool = True) -> list[Tensor]:
    batches = list(permute(torch.arange(samples), samples, seed, epoch).split(size))
    return [batch for batch in batches if len(batch) == size or not drop_last]


def _expect_pairs(case: dict[str, Any]) -> Losses:
    """The loss of each step, in plain torch on whole batches."""
    (x, y), (u,), (size, more) = bodies.make_labelled().tensors, bodies.make_more().tensors, case["sizes"]
    second = derive_key("loader", 5, 2)
    passes = (_orders(len(u), more, second, epoch) for epoch in itertools.count())
    endless = itertools.chain.from_iterable(passes)
    for epoch in range(3):
        first = _orders(len(x), size, 5, epoch, drop_last=case.get("drop_last", True))
        if case["how"] == "endless":
            others: Any = endless
        else:
            others = next(passes)
        for a, b in zip(first, others, strict=False):
            yield lambda model, a=a, b=b: bodies.both(x[a], y[a], u[b], model)


def _expect_steps(steps: int) -> Losses:
    x, y = bodies.make_labelled().tensors
    batches = (a for epoch in itertools.count() for a in _orders(len(x), 5, 5, epoch, drop_last=False))
    for a in itertools.islice(batches, steps):
        yield lambda model, a=a: cross_entropy(model(x[a]), y[a])


def _expect_items(case: dict[str, Any]) -> Losses:
    x, y = bodies.make_labelled().tensors
    buckets = bodies.Buckets(len(x))
    for epoch in range(2):
        items = list(read_items(buckets, 5, epoch))
        if case["how"] == "pieces":
            items = [buckets.batches[i] for i in permute(torch.arange(len(buckets)), len(buckets), 5, epoch)]
        for at in range(0, len(items), 3):
            a = torch.tensor([index for item in items[at : at + 3] for index in item])
            yield lambda model, a=a: cross_entropy(model(x[a]), y[a])


def _train(losses: Losses) -> list[list[Tensor]]:
    torch.set_num_threads(1)
    model = bodies.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    trajectory = []
    for loss in losses:
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
        trajectory.append([p.detach().clone() for p in model.parameters()])
    return trajectory


def _is_as(expected: list[list[Tensor]], *outs: Path) -> bool:
    """Whether what the attempts wrote is the expected training, step by step."""
    found = [one for out in outs for one in torch.load(out)["trajectory"]]
    assert [step for step, _ in found] == list(range(1, len(expected) + 1))
    pairs = zip((weights for _, weights in found), expected, strict=True)
    return max(float((a - b).abs().max()) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True)) < 1e-12


def test_all_are_as_one_process_on_any_ranks_with_stops_between(run_ranks: RunRanks, tmp_path: Path) -> None:
    cases = {
        **{name: ("train_pair", case, _expect_pairs(case)) for name, case in PAIRS.items()},
        "steps": ("train_steps", {"how": "steps", "steps": 13}, _expect_steps(13)),
        **{name: ("train_items", case, _expect_items(case)) for name, case in ITEMS.items()},
    }
    for ranks, stop in ((2, 4), (3, 5), (1, None)):
        jobs = [
            (body, case | {"out": str(tmp_path / f"{name} {ranks}"), "run_dir": str(tmp_path / name), "stop": stop})
            for name, (body, case, _) in cases.items()
        ]
        run_ranks("loaders_bodies:train_all", ranks, jobs).check()
    wrong = {
        name
        for name, (_, _, losses) in cases.items()
        if not _is_as(_train(losses), *(tmp_path / f"{name} {ranks}" for ranks in (2, 3, 1)))
    }
    assert wrong == set()


def test_a_loss_over_two_loaders_is_refused_where_their_shares_are_not_in_proportion(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    outcome = run_ranks("loaders_bodies:train_pair", 2, {"how": "zip", "sizes": [10, 21], "out": str(tmp_path / "out")})
    assert 0 not in outcome.statuses
    text = "".join(outcome.outputs)
    assert "one loss for 10 samples and the 21 of training loader 2" in text


@contextmanager
def _opened(second: Any = None, **options: Any) -> Iterator[Any]:
    """A run of one process: (rt, model, optimizer, first loader and the second)."""
    with hpcddp.runtime(**options) as rt:
        model = bodies.make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loaders = [DataLoader(bodies.make_labelled(), 5, shuffle=True)]
        loaders += [DataLoader(bodies.make_more(), 8, shuffle=True)] if second else []
        yield rt, *rt.prepare(model, optimizer, *loaders)


def test_a_finished_loop_over_steps_goes_on_only_if_more_are_asked_for(tmp_path: Path) -> None:
    made = []
    for steps in (7, 7, 9):
        with _opened(run_dir=str(tmp_path / "run")) as (rt, model, optimizer, _):
            for nth, (x, y) in enumerate(rt.batches(steps)):
                optimizer.zero_grad()
                rt.backward(cross_entropy(model(x), y))
                optimizer.step()
                if nth == 2:
                    rt.save_best(float(nth))
        made.append(rt.steps)
        state = json.loads((tmp_path / "run" / "state.json").read_text())
        assert (state["status"], state["step"], state["asked"]) == ("finished", rt.steps, {"steps": rt.steps})
    assert made == [7, 7, 9]
    best = json.loads((tmp_path / "run" / "checkpoints" / "best.json").read_text())
    assert best["step"] == 3


def _items(loader: DataLoader, *, items_per_step: int | None = None, **options: Any) -> None:
    with hpcddp.runtime(**options) as rt:
        rt.loader(loader, items_per_step=items_per_step)


def _buckets(data: TensorDataset, **options: Any) -> DataLoader:
    return DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data, **options), 4, drop_last=False))


def _take(how: str) -> None:
    with _opened(second=True, max_micro_batch=4 if how == "mixed" else None) as (rt, model, optimizer, first, second):
        for _ in rt.epochs(2):
            pairs = zip(first, second, strict=False)
            for a, b in pairs:
                optimizer.zero_grad()
                if how == "mixed":
                    for (x, _y), (u,) in zip(rt.micro_batches(a), rt.micro_batches(b), strict=False):
                        rt.backward(model(x).sum() + model(u).sum())
                elif how == "unknown":
                    rt.backward(model(a[0]).sum(), of=a[0].clone())
                else:
                    rt.backward(bodies.both(*a, *b, model))
                optimizer.step()


def _save_early() -> None:
    with _opened() as (rt, *_):
        for _ in rt.batches(3):
            rt.save_best(1.0)


DATA = bodies.make_labelled()
REFUSED: dict[str, tuple[Callable[[], None], str]] = {
    "how many batches make a step": (lambda: _items(_buckets(DATA)), r"makes its own batches, and nothing says how"),
    "how many samples a batch has": (
        lambda: _items(DataLoader(DATA, batch_size=None), items_per_step=2),
        r"batch_size=None, and nothing says .*count=lambda batch: len\(batch\[0\]\)\)",
    ),
    "items of a plain loader": (
        lambda: _items(DataLoader(DATA, 4), items_per_step=2),
        r"items_per_step=2 was given, and the DataLoader has a batch_size",
    ),
    "an order that cannot be found again": (
        lambda: _items(_buckets(DATA, generator=torch.Generator()), items_per_step=2),
        "two passes over this BatchSampler for one epoch give different batches",
    ),
    "other slices": (
        lambda: _items(_buckets(DATA), items_per_step=2, exact=True),
        "a global batch of 2 cannot be cut into 8 slices",
    ),
    "sizes beside buckets": (
        lambda: _items(_buckets(DATA), items_per_step=2, max_micro_batch=4),
        r"max_micro_batch=4 was given, .*hint: leave out max_micro_batch",
    ),
    "buckets for evaluation": (
        lambda: _evaluate(_buckets(DATA)),
        r"evaluation takes a data set whose samples make no batches",
    ),
    "a held zip": (lambda: _take("held"), "the script held the one before, with batches left"),
    "micro batches of two at once": (lambda: _take("mixed"), "another batch than the one that the loop is at"),
    "a copy": (lambda: _take("unknown"), r"of= is no batch of this step.*rt\.backward\(loss, of=x\)"),
    "the best before its step": (_save_early, r"in a step, before optimizer\.step\(\)|inside a step, before"),
}


def _evaluate(loader: DataLoader) -> None:
    with hpcddp.runtime() as rt:
        rt.evaluation_loader(loader)


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_have_to_be_guessed_is_refused(name: str) -> None:
    run, words = REFUSED[name]
    with pytest.raises(RequestError) as refused:
        run()
    assert re.search(words, str(refused.value), re.DOTALL), str(refused.value)


def test_a_look_at_a_second_loader_before_the_training_takes_nothing_from_it() -> None:
    seen = []
    for looks in (False, True):
        with _opened(second=True, seed=5) as (rt, model, optimizer, first, second):
            if looks:
                next(iter(second))
            for _ in rt.epochs(1):
                for a, b in zip(first, second, strict=False):
                    optimizer.zero_grad()
                    rt.backward(bodies.both(*a, *b, model))
                    optimizer.step()
                    seen.append(b[0])
    assert all(torch.equal(a, b) for a, b in zip(seen[: len(seen) // 2], seen[len(seen) // 2 :], strict=True))
