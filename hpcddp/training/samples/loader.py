"""Micro batches of this rank's share of each global batch, on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hpcddp.batchplan import BatchPlan, split_evenly
from hpcddp.errors import RequestError
from hpcddp.training.samples.randomness import SeededSamples
from hpcddp.training.samples.sampler import GlobalBatchSampler, MicroBatch
from hpcddp.training.samples.streamsampler import StreamSampler, read_stream
from hpcddp.training.samples.weighing import Loaded, Weighing, make_loaded, split_pair


class Batch(NamedTuple):
    """One micro batch. `x` and `y` are what (x, y) samples collate to; `y` is None where a sample is no pair."""

    x: Any
    y: Any
    weight: float | Tensor  # what `rt.backward` multiplies the mean loss of this micro batch by
    last: bool  # the step ends with this micro batch
    samples: int  # how many count: 0 in a micro batch that only keeps the ranks in step
    total: int  # samples of the whole global batch
    counted: int  # samples, or what `count=` gave: what the mean loss is a mean over
    weight_each: float | Tensor  # what `rt.backward(…, summed=True)` multiplies the summed loss by


def move(thing: Any, device: torch.device) -> Any:
    """The tensors in tuples, lists, named tuples and dicts, copied to the device without waiting."""
    if isinstance(thing, Tensor):
        return thing.to(device, non_blocking=True)
    if isinstance(thing, dict):
        return {key: move(value, device) for key, value in thing.items()}
    if isinstance(thing, tuple) and hasattr(thing, "_fields"):
        return type(thing)(*(move(value, device) for value in thing))
    if isinstance(thing, list | tuple):
        return type(thing)(move(value, device) for value in thing)
    return thing


class _Draws:
    """The sampler's indices with their epoch, as SeededSamples wants them."""

    def __init__(self, sampler: GlobalBatchSampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch = self._sampler.epoch
        return ([(epoch, index) for index in indices] for indices in self._sampler)


def read_samples(
    dataset: Dataset[Any],
    sampler: GlobalBatchSampler,
    *,
    num_workers: int,
    pin_memory: bool,
    collate_fn: Callable[[list[Any]], Any] | None,
) -> Callable[[], Iterator[Loaded]]:
    """A function that reads the rest of the sampler's epoch."""
    loader: DataLoader[Any] = DataLoader(
        SeededSamples(dataset, sampler.seed),
        batch_sampler=_Draws(sampler),
        num_workers=num_workers,
        collate_fn=collate_fn,
        pin_memory=pin_memory,
        persistent_workers=num_workers > 0,
        generator=torch.Generator(),  # an iterator draws a seed: not from the generator of the user's loop
    )
    return lambda: (make_loaded(*both) for both in zip(sampler.micro_batches(), loader, strict=True))


def make_sampler(
    dataset: Dataset[Any], plan: BatchPlan, rank: int, *, seed: int, shuffle: bool
) -> GlobalBatchSampler | StreamSampler:
    """The sampler for data with an index, or for a stream."""
    if isinstance(dataset, IterableDataset):
        return StreamSampler(dataset, plan, rank, seed=seed)
    length = len(dataset)  # type: ignore[arg-type]  # torch's Dataset declares no __len__; map-style ones have it
    return GlobalBatchSampler(length, plan, rank, seed=seed, shuffle=shuffle)


class MicroBatchLoader:
    """Iterating gives the rest of the current epoch. `current` is the micro batch that the loop is at."""

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: GlobalBatchSampler | StreamSampler,
        device: torch.device,
        weighing: Weighing,
        *,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        started: Callable[[], None] = lambda: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self.dataset = dataset
        self.sampler = sampler
        self.weighing = weighing
        self.current: MicroBatch | None = None
        self._device = device
        self._started = started
        self._stopped = stopped
        how: Any = {"num_workers": num_workers, "pin_memory": device.type == "cuda", "collate_fn": collate_fn}
        if isinstance(sampler, GlobalBatchSampler):
            self._read = read_samples(dataset, sampler, **how)
        else:
            self._read = read_stream(sampler, **how)

    def __len__(self) -> int:
        """Micro batches left in this epoch. TypeError for a stream whose length is not known."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Batch]:
        self._started()
        for (micro, x, y), weight in self.weighing.over(self._read()):
            self.current = micro
            x, y = move(x, self._device), move(y, self._device)
            yield Batch(x, y, weight.mean, micro.last, micro.samples, micro.total, weight.counted, weight.each)
            if self._stopped():
                return

    def close(self) -> None:
        """Loader processes end, which would hold on to the open sockets of this process, and no more is read."""
        self._read = lambda: iter(())


class Shard:
    """One rank's contiguous part of a data set, in batches on the device: for evaluation.

    Parts differ by at most one sample, so ranks may have different numbers of batches: no collective belongs inside the
    loop. With `equal_batches` they have equally many, and what a rank has too few of holds one sample that does not
    count. RequestError where a forward pass is a collective and ranks would not have equally many.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        rank: int,
        world_size: int,
        device: torch.device,
        *,
        num_workers: int,
        equal_batches: bool = False,
        meets_in_forward: Callable[[], bool] = lambda: False,
    ) -> None:
        self._total = len(dataset)  # type: ignore[arg-type]  # torch's Dataset declares no __len__; map-style ones have it
        sizes = split_evenly(self._total, world_size)
        first = sum(sizes[:rank])
        end = first + sizes[rank]
        parts = [range(i, min(i + batch_size, end)) for i in range(first, end, batch_size)]
        self._sizes = [len(part) for part in parts]
        most = -(-sizes[0] // batch_size)
        self._uneven = -(-sizes[-1] // batch_size) != most and not equal_batches
        self._meets_in_forward = meets_in_forward
        if equal_batches:
            idle = most - len(parts)
            parts += [range(1)] * idle
            self._sizes += [0] * idle
        self._device = device
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=[list(part) for part in parts],
            num_workers=num_workers,
            pin_memory=device.type == "cuda",
            generator=torch.Generator(),
        )

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[Batch]:
        if self._uneven and self._meets_in_forward():
            raise RequestError(
                "some ranks have one batch less to evaluate, and a model in parts needs all ranks in each forward pass",
                "rt.shard(dataset, batch_size, equal_batches=True), and count batch.samples, which may be 0",
            )
        for count, loaded in zip(self._sizes, self._loader, strict=True):
            x, y = (move(part, self._device) for part in split_pair(loaded))
            yield Batch(x, y, count / self._total, False, count, self._total, count, 1 / self._total)
