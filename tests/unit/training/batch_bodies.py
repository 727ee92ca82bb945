"""What the ranks of the tests of the global batch run, and the same in plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import hpcddp
from hpcddp.training.data.sampler import permute

SENTENCES, LENGTH, FEATURES, CLASSES = 23, 6, 5, 3
IGNORED = -100


def ragged_data() -> TensorDataset:
    """Sentences of 0 to 6 tokens: some have none at all."""
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(SENTENCES, LENGTH, FEATURES, dtype=torch.float64, generator=generator)
    y = torch.randint(CLASSES, (SENTENCES, LENGTH), generator=generator)
    lengths = torch.randint(-3, LENGTH + 1, (SENTENCES, 1), generator=generator).clamp(min=0)
    y[torch.arange(LENGTH) >= lengths] = IGNORED
    return TensorDataset(x, y)


def token_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


def count_tokens(batch: tuple[Tensor, Tensor]) -> int:
    _, y = batch
    return int((y != IGNORED).sum())


def masked_mean(scores: Tensor, y: Tensor) -> Tensor:
    """As people write it: 0/0 where nothing counts, and NaN in every gradient."""
    mask = (y != IGNORED).double()
    losses = cross_entropy(scores.transpose(1, 2), y.clamp(min=0), reduction="none")
    return (losses * mask).sum() / mask.sum()


def summed(scores: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(scores.transpose(1, 2), y, reduction="sum", ignore_index=IGNORED)


def train_tokens(arguments: list[dict[str, Any]]) -> None:
    """One training after the other; rank 0 writes the weights after each step to argument["out"]."""
    for argument in arguments:
        trajectory = []
        loss_of = {"mean": masked_mean, "sum": summed}[argument["loss"]]
        with hpcddp.runtime(argument["global_batch"], seed=5, **argument.get("options", {})) as rt:
            model = rt.wrap(token_model())
            scale = argument.get("scale", 1)  # of what counts: the mean is the same
            loader = rt.loader(
                DataLoader(ragged_data(), shuffle=True, num_workers=argument.get("workers", 0)),
                count=lambda batch, scale=scale: scale * count_tokens(batch),
            )
            optimizer = rt.prepare(torch.optim.AdamW(model.parameters(), lr=0.05))
            for _epoch in rt.epochs(2):
                for batch in loader:
                    optimizer.zero_grad()
                    for x, y in rt.micro_batches(batch):
                        rt.backward(loss_of(model(x), y), summed=argument["loss"] == "sum")
                    optimizer.step()
                    trajectory.append([p.detach().clone() for p in model.parameters()])
        if rt.group.is_first:
            torch.save(trajectory, argument["out"])


def reference_tokens(global_batch: int, loss_of: Any = masked_mean) -> tuple[list[list[Tensor]], list[float]]:
    """Weights after each step, and losses, of plain torch on whole global batches."""
    model = token_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    x, y = ragged_data().tensors
    trajectory, losses = [], []
    for epoch in range(2):
        order = permute(torch.arange(SENTENCES), SENTENCES, 5, epoch)
        for chosen in torch.split(order, global_batch):
            optimizer.zero_grad()
            loss = loss_of(model(x[chosen]), y[chosen])
            loss.backward()
            optimizer.step()
            trajectory.append([p.detach().clone() for p in model.parameters()])
            losses.append(float(loss.detach()))
    return trajectory, losses


class PlainStream(IterableDataset):
    """No length, no skip, shuffled with the global generator; so many samples that 10 does not divide them."""

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        for i in torch.randperm(37).tolist():
            yield torch.ones(2, dtype=torch.float64), i


class SkippingStream(IterableDataset):
    """The same samples in their order, from an iterator that can skip."""

    def __iter__(self) -> Any:
        class Samples:
            at = -1

            def __next__(self) -> tuple[Tensor, int]:
                self.at += 1
                if self.at >= 37:
                    raise StopIteration
                return torch.ones(2, dtype=torch.float64), self.at

            def skip(self, count: int) -> int:
                count = min(count, 36 - self.at)
                self.at += count
                return count

        return Samples()


def sorted_stream(epochs: int) -> list[tuple[int, int]]:
    """(epoch, sample) of both."""
    return [(epoch, i) for epoch in range(epochs) for i in range(37)]


def train_stream(argument: dict[str, Any]) -> None:
    """Each rank appends (epoch, sample) of what counted to a file of its own; stops after so many steps."""
    dataset = PlainStream() if argument["kind"] == "plain" else SkippingStream()
    with hpcddp.runtime(10, seed=5, run_dir=argument["run_dir"]) as rt:
        model = rt.wrap(nn.Linear(2, 1).double())
        loader = rt.loader(DataLoader(dataset, num_workers=1 if argument["kind"] == "plain" else 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rt.track(model=model, optimizer=optimizer)
        last = rt.steps + argument["steps"] if argument["steps"] else None
        seen = Path(argument["folder"]) / f"{argument['kind']}-{rt.group.world_size}-{rt.group.rank}.seen"
        with seen.open("a") as file:
            for epoch in rt.epochs(2):
                for x, numbers in loader:
                    optimizer.zero_grad()
                    rt.backward(model(x).square().mean())
                    file.writelines(f"[{epoch}, {i}]\n" for i in numbers[: rt.samples].tolist())
                    optimizer.step()
                    if rt.steps + 1 == last:
                        rt.stop("so many steps")


def train_normalised(argument: dict[str, Any]) -> None:
    """InstanceNorm, BatchNorm, and a last global batch of one sample; each rank writes statistics and gradients of each
    step."""
    x = torch.arange(8, dtype=torch.float64).reshape(4, 1, 2) * torch.tensor([1.0, -2.0])
    data = TensorDataset(x.repeat(1, 3, 1), torch.zeros(4))  # three vectors a sample, for the statistics of one
    with hpcddp.runtime(3, seed=5) as rt:
        torch.manual_seed(3)
        each = nn.InstanceNorm1d(3, track_running_stats=True)
        inner = nn.Sequential(each, nn.Flatten(0, 1), nn.BatchNorm1d(2), nn.Linear(2, 1)).double()
        model = rt.wrap(inner)
        loader = rt.loader(DataLoader(data))
        optimizer = rt.prepare(torch.optim.SGD(model.parameters(), lr=0.0))
        for _epoch in rt.epochs(1):
            for x, _ in loader:
                model.train()
                loss = (model(x) - 1).square().mean()
                counts = rt.samples > 0
                own = torch.autograd.grad(loss, inner[3].weight, retain_graph=True)[0] if counts else None
                rt.backward(loss)
                state = {
                    "mean": torch.cat((each.running_mean, inner[2].running_mean)),
                    "gradient": inner[3].weight.grad,
                    "own": own,
                }
                torch.save(state, f"{argument['folder']}/{rt.group.rank}-{rt.steps + 1}")
                optimizer.step()
                model.zero_grad()
        torch.save(torch.cat((each.running_mean, inner[2].running_mean)), f"{argument['folder']}/{rt.group.rank}-end")
