"""Micro batches of this rank's share of each global batch, on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from hpcddp.batchplan import split_evenly
from hpcddp.training.randomness import SeededSamples
from hpcddp.training.sampler import GlobalBatchSampler, MicroBatch
from hpcddp.training.weighing import Loaded, Weighing


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


class MicroBatchLoader:
    """Iterating gives the rest of the current epoch. `current` is the micro batch that the loop is at."""

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: GlobalBatchSampler,
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
        self.current: MicroBatch | None = None
        self._device = device
        self.weighing = weighing
        self._started = started
        self._stopped = stopped
        self._loader: DataLoader[Any] = DataLoader(
            SeededSamples(dataset, sampler.seed),
            batch_sampler=_Draws(sampler),
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=device.type == "cuda",
            persistent_workers=num_workers > 0,
            generator=torch.Generator(),  # an iterator draws a seed: not from the generator of the user's loop
        )

    def __len__(self) -> int:
        """Micro batches left in this epoch."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Batch]:
        self._started()
        for (micro, x, y), weight in self.weighing.over(self._read()):
            self.current = micro
            x, y = move(x, self._device), move(y, self._device)
            yield Batch(x, y, weight.mean, micro.last, micro.samples, micro.total, weight.counted, weight.each)
            if self._stopped():
                return

    def _read(self) -> Iterator[Loaded]:
        for micro, loaded in zip(self.sampler.micro_batches(), self._loader, strict=True):
            yield Loaded(micro, *_pair(loaded))


class Shard:
    """One rank's contiguous part of a data set, in batches on the device: for evaluation.

    Parts differ by at most one sample, so ranks may have different numbers of batches: no collective belongs inside the
    loop.
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
    ) -> None:
        total = len(dataset)  # type: ignore[arg-type]  # torch's Dataset declares no __len__; map-style ones have it
        sizes = split_evenly(total, world_size)
        first = sum(sizes[:rank])
        self._total = total
        self._device = device
        part = Subset(dataset, range(first, first + sizes[rank]))
        self._loader: DataLoader[Any] = DataLoader(
            part,
            batch_size=batch_size,
            num_workers=num_workers,
            pin_memory=device.type == "cuda",
            generator=torch.Generator(),
        )
        self._sizes = [min(batch_size, sizes[rank] - i) for i in range(0, sizes[rank], batch_size)]

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[Batch]:
        for count, loaded in zip(self._sizes, self._loader, strict=True):
            x, y = (move(part, self._device) for part in _pair(loaded))
            yield Batch(x, y, count / self._total, False, count, self._total, count, 1 / self._total)


def _pair(loaded: Any) -> tuple[Any, Any]:
    """What samples collated to, as (x, y)."""
    return tuple(loaded) if isinstance(loaded, list | tuple) and len(loaded) == 2 else (loaded, None)
