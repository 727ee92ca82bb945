"""Random numbers that depend on what is computed, never on which process computes it or what it computed before.

Every micro batch and every sample gets a generator state from a key such as (seed, step, rank) or (seed, epoch,
sample). So there is no random state to save: a resumed run draws what the undisturbed one would have drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import Dataset, get_worker_info

from hpcddp.training.data.generators import States, is_drawn_from, read_states, read_torch, restore, seed_numpy
from hpcddp.training.data.permutation import derive_key


def seed_generators(*key: int | str) -> None:
    """Seed Python's, torch's (CPU and accelerator) and, where it is imported, numpy's global generator from a key."""
    number = derive_key(*key)
    random.seed(number)
    # not torch.manual_seed: until CUDA is initialised it keeps a queue with a stack trace of each call (90 us)
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch does not annotate it
        torch.cuda.manual_seed(number)
    seed_numpy(number)


@contextmanager
def kept_generators() -> Iterator[None]:
    """What is drawn inside leaves the generators outside as they were."""
    states = read_states()
    try:
        yield
    finally:
        restore(states)


class SeededSamples(Dataset[object]):
    """A data set whose random transforms draw the same for (seed, epoch, sample), in whichever worker of whichever
    rank.

    It is indexed by (epoch, sample), so that workers that outlive an epoch need no message about the next. Seeding
    takes longer than reading many a sample. So a batch, and before it the first sample of all, is read without, and
    read again with it if something was drawn. From then on every sample is seeded before it is read.
    """

    def __init__(self, dataset: Dataset[Any], seed: int, *, collates: bool = False) -> None:
        """`collates`: whether the caller's own code makes a batch of the samples, and may draw for it."""
        self.dataset = dataset
        self.seed = seed
        self._collates = collates
        self._draws: bool | None = None  # None: no sample was read yet
        self._epoch: int | None = None
        self._epoch_key = 0
        self._epoch_state = b""  # of torch's generator

    def __getitem__(self, draw: tuple[int, int]) -> object:
        return self.__getitems__([draw])[0]

    def __getitems__(self, draws: list[tuple[int, int]]) -> list[object]:
        """A whole batch, which is how a DataLoader asks when this method exists."""
        if self._draws is None and len(draws) > 1:
            samples = self._read(draws[:1]) + self._read(draws[1:])
        else:
            samples = self._read(draws)
        if self._collates and get_worker_info() is not None:  # in the training process the step has seeded
            seed_generators("batch", self.seed, *draws[0])
        return samples

    def _read(self, draws: list[tuple[int, int]]) -> list[object]:
        before = read_states()
        try:
            samples = None if self._draws else self._read_unseeded(draws, before)
            return self._read_seeded(draws) if samples is None else samples
        finally:
            restore(before)

    def _read_unseeded(self, draws: list[tuple[int, int]], before: States) -> list[object] | None:
        """The samples of one epoch; None if something was drawn."""
        self._seed_torch(draws[0][0])
        try:
            samples = self._fetch([index for _, index in draws])
        except Exception:
            if not is_drawn_from(before, self._epoch_state):
                raise
            samples = []
        self._draws = is_drawn_from(before, self._epoch_state)
        return None if self._draws else samples

    def _read_seeded(self, draws: list[tuple[int, int]]) -> list[object]:
        samples = []
        for epoch, index in draws:
            seed_generators("sample", self.seed, epoch, index)
            samples.append(self.dataset[index])
        return samples

    def _seed_torch(self, epoch: int) -> None:
        """A sample may read torch.initial_seed() without drawing: it gets the epoch's."""
        if epoch != self._epoch:
            self._epoch, self._epoch_key = epoch, derive_key("samples", self.seed, epoch)
            torch.default_generator.manual_seed(self._epoch_key)
            self._epoch_state = read_torch()
        else:
            torch.default_generator.manual_seed(self._epoch_key)

    def _fetch(self, indices: list[int]) -> list[object]:
        """As torch's loader: at once where the data set can."""
        if getattr(self.dataset, "__getitems__", None):
            return list(self.dataset.__getitems__(indices))  # type: ignore[attr-defined]  # not every data set has it
        return [self.dataset[index] for index in indices]


class WorkerStart:
    """The worker_init_fn of a loader of SeededSamples: `get_worker_info().dataset` is the user's data set, as it would
    be without them. A class, because workers that are not forked get it pickled."""

    def __init__(self, init: Callable[[int], object] | None) -> None:
        self._init = init

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, SeededSamples):
            object.__setattr__(info, "dataset", info.dataset.dataset)  # torch lets nobody else set it
        if self._init is not None:
            self._init(worker)
