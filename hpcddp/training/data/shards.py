"""Files of samples (shards) as one stream in which passing over samples costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import IterableDataset

from hpcddp.errors import RequestError
from hpcddp.training.data.sampler import permute

Name = TypeVar("Name")


class ShardedStream(IterableDataset[Any], Generic[Name]):
    """The samples of shards, shard after shard; the order of the shards changes with each epoch if `shuffle`.

    `shards` are (name, samples in it); `read(name, start)` gives an iterator over the shard's samples from number
    `start` on. It is called again after each gap, unless the iterator has a `skip(count)` of its own. Shards that only
    other ranks take are never opened.
    """

    def __init__(
        self,
        shards: Sequence[tuple[Name, int]],
        read: Callable[[Name, int], Iterator[Any]],
        *,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        if min((samples for _, samples in shards), default=0) < 0:
            raise RequestError("a shard has a negative number of samples", "give (name, samples in it) for each shard")
        self.shards = list(shards)
        self.read = read
        self.seed = seed
        self.shuffle = shuffle
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return sum(samples for _, samples in self.shards)

    def __iter__(self) -> ShardIterator[Name]:
        positions = torch.arange(len(self.shards))
        order = permute(positions, len(positions), self.seed, self._epoch) if self.shuffle else positions
        return ShardIterator([self.shards[i] for i in order.tolist()], self.read)


class ShardIterator(Iterator[Any], Generic[Name]):
    """Opens a shard when a sample of it is wanted, at that sample."""

    def __init__(self, shards: list[tuple[Name, int]], read: Callable[[Name, int], Iterator[Any]]) -> None:
        self._shards = shards
        self._read = read
        self._nth = 0
        self._at = 0  # in the shard
        self._samples: Iterator[Any] | None = None

    def __next__(self) -> Any:
        while self._nth < len(self._shards) and self._at == self._shards[self._nth][1]:
            self._next_shard()
        if self._nth == len(self._shards):
            raise StopIteration
        name, samples = self._shards[self._nth]
        if self._samples is None:
            self._samples = self._read(name, self._at)
        try:
            sample = next(self._samples)
        except StopIteration:
            raise RequestError(
                f"shard {name} ended after {self._at} of {samples} samples", "give the true number of each shard"
            ) from None
        self._at += 1
        return sample

    def skip(self, count: int) -> int:
        """Pass over the next `count` samples without reading them; returns how many there were."""
        left = count
        while left and self._nth < len(self._shards):
            here = self._shards[self._nth][1] - self._at
            if left < here:
                self._at += left
                if callable(skip := getattr(self._samples, "skip", None)):
                    skip(left)
                else:
                    self._samples = None  # opened again where the next sample is
                return count
            left -= here
            self._next_shard()
        return count - left

    def _next_shard(self) -> None:
        self._nth += 1
        self._at = 0
        self._samples = None
