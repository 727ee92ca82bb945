"""What the ranks of test_loaders.py run: two training loaders, loops over steps, and batches that the script makes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset

import hpcddp

LABELLED, MORE, CLASSES, FEATURES = 22, 50, 3, 4


def make_labelled() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(LABELLED, FEATURES, dtype=torch.float64, generator=generator)
    return TensorDataset(x, torch.randint(CLASSES, (LABELLED,), generator=generator))


def make_more() -> TensorDataset:
    return TensorDataset(torch.randn(MORE, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(2)))


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()


def consistency(scores: Tensor) -> Tensor:
    """A loss of unlabelled samples: a mean over them."""
    return scores.softmax(1).square().sum(1).log().mean()


def both(x: Tensor, y: Tensor, u: Tensor, model: nn.Module) -> Tensor:
    """A loss over batches of both loaders, after one forward pass."""
    scores = model(torch.cat([x, u]))
    return cross_entropy(scores[: len(x)], y) + 0.5 * consistency(scores[len(x) :])


def pair(how: str, first: Any, second: Any, endless: list[Any]) -> Iterator[tuple[Any, Any]]:
    """The batches of an epoch's steps, taken in one of the usual ways."""
    if how == "reversed":
        return ((a, b) for b, a in zip(second, first, strict=False))
    if how == "endless":
        return ((a, next_of(second, endless)) for a in first)
    return zip(first, second, strict=False)


def next_of(second: Any, endless: list[Any]) -> Any:
    """The next batch of an iterator that begins again at its end."""
    if not endless:
        endless.append(iter(second))
    try:
        return next(endless[0])
    except StopIteration:
        endless[0] = iter(second)
        return next(endless[0])


def train_all(jobs: list[tuple[str, dict[str, Any]]]) -> None:
    """One training after the other, in the same processes."""
    for body, argument in jobs:
        globals()[body](argument)


def train_pair(argument: dict[str, Any]) -> None:
    """Two loaders in one loop; rank 0 writes the weights after each step to argument["out"]."""
    how, sizes = argument["how"], argument["sizes"]
    trajectory = []
    with hpcddp.runtime(
        seed=5,
        run_dir=argument.get("run_dir"),
        max_micro_batch=argument.get("max_micro_batch"),
        exact=argument.get("exact", False),
        slices=argument.get("slices"),
    ) as rt:
        model = make_model()
        first = DataLoader(make_labelled(), sizes[0], shuffle=True, drop_last=argument.get("drop_last", True))
        second = DataLoader(make_more(), sizes[1], shuffle=True, drop_last=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        model, optimizer, first, second = rt.prepare(model, optimizer, first, second)
        endless: list[Any] = []
        for _epoch in rt.epochs(argument.get("epochs", 3)):
            for a, b in pair(how, first, second, endless):
                optimizer.zero_grad()
                if how == "micro":
                    for x, y in rt.micro_batches(a):
                        rt.backward(cross_entropy(model(x), y))
                    rt.train_step(b, lambda micro: 0.5 * consistency(model(micro[0])))
                elif how == "of":
                    (x, y), (u,) = a, b
                    rt.backward(cross_entropy(model(x), y), of=a)
                    rt.backward(0.5 * consistency(model(u)), of=u)
                else:
                    rt.backward(both(*a, *b, model))
                optimizer.step()
                trajectory.append((rt.steps + 1, [p.detach().clone() for p in model.parameters()]))
                if rt.steps + 1 == argument.get("stop"):
                    rt.stop("the test")
    if rt.group.is_first:
        torch.save({"trajectory": trajectory, "reason": rt.stop_reason, "sha": rt.weights_sha256}, argument["out"])


def train_steps(argument: dict[str, Any]) -> None:
    """A loop over steps, without epochs."""
    trajectory = []
    with hpcddp.runtime(seed=5, run_dir=argument.get("run_dir")) as rt:
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        model, optimizer, _ = rt.prepare(model, optimizer, DataLoader(make_labelled(), 5, shuffle=True))
        for x, y in rt.batches(argument["steps"]):
            optimizer.zero_grad()
            rt.backward(cross_entropy(model(x), y))
            optimizer.step()
            trajectory.append((rt.steps + 1, [p.detach().clone() for p in model.parameters()]))
            if rt.steps + 1 == argument.get("stop"):
                rt.stop("the test")
            if rt.steps + 1 == argument.get("best"):
                rt.save_best(1.0)
    if rt.group.is_first:
        torch.save({"trajectory": trajectory, "reason": rt.stop_reason, "steps": rt.steps}, argument["out"])


class Buckets:
    """Batches of samples of like length, of two to four samples, in another order in each pass."""

    def __init__(self, samples: int) -> None:
        self.batches, at = [], 0
        while at < samples:
            size = min(2 + at % 3, samples - at)
            self.batches.append(list(range(at, at + size)))
            at += size

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter([self.batches[i] for i in torch.randperm(len(self.batches))])


class Pieces(Dataset[Any]):
    """A data set whose samples are batches."""

    def __init__(self) -> None:
        self.batches = Buckets(LABELLED).batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        x, y = make_labelled().tensors
        return x[self.batches[index]], y[self.batches[index]]


def train_items(argument: dict[str, Any]) -> None:
    """Batches that the script makes; rank 0 writes the weights after each step."""
    trajectory = []
    if argument["how"] == "buckets":
        data, count = DataLoader(make_labelled(), batch_sampler=Buckets(LABELLED)), None
    else:
        data, count = DataLoader(Pieces(), batch_size=None, shuffle=True), lambda batch: len(batch[0])
    with hpcddp.runtime(
        seed=5, run_dir=argument.get("run_dir"), exact=argument.get("exact", False), slices=argument.get("slices")
    ) as rt:
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        loader = rt.loader(data, items_per_step=argument["items"], count=count)
        model, optimizer = rt.prepare(model, optimizer)
        for _ in rt.epochs(2):
            for batch in loader:
                optimizer.zero_grad()
                rt.train_step(batch, lambda micro: cross_entropy(model(micro[0]), micro[1]))
                optimizer.step()
                trajectory.append((rt.steps + 1, [p.detach().clone() for p in model.parameters()]))
                if rt.steps + 1 == argument.get("stop"):
                    rt.stop("the test")
    if rt.group.is_first:
        torch.save({"trajectory": trajectory, "reason": rt.stop_reason}, argument["out"])
