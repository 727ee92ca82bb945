"""Random numbers that depend on what is computed, never on which process computes it or what it computed before.

Every micro batch and every sample gets a generator state from a key such as (seed, step, rank) or (seed, epoch,
sample). So there is no random state to save: a resumed run draws what the undisturbed one would have drawn.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, get_worker_info

from hpcddp.training.data.sampler import derive_key

# The states of the global generators.


class States(NamedTuple):
    """Python's, numpy's legacy one (None where numpy is not imported), the current CUDA device's as seed and offset
    (None where CUDA is not initialised), and torch's on the CPU."""

    python: Any
    numpy: Any
    cuda: tuple[int, int] | None
    torch: Tensor


def read_states() -> States:
    """The states now."""
    numpy, cuda = None, None
    if (np := sys.modules.get("numpy")) is not None:
        name, words, *rest = np.random.get_state()
        numpy = name, words.tobytes(), *rest
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch does not annotate it
        generator = _cuda_generator()
        cuda = generator.initial_seed(), generator.get_offset()
    return States(random.getstate(), numpy, cuda, torch.default_generator.get_state())


def restore(states: States) -> None:
    """Put these states back."""
    random.setstate(states.python)
    if states.numpy is not None:
        import numpy as np

        name, words, *rest = states.numpy
        np.random.set_state((name, np.frombuffer(words, np.uint32), *rest))
    if states.cuda is not None:
        generator = _cuda_generator()
        generator.manual_seed(states.cuda[0])
        generator.set_offset(states.cuda[1])
    torch.default_generator.set_state(states.torch)


def is_drawn_from(before: States, torch_before: Tensor) -> bool:
    """Whether a generator changed. `before` are their states but for torch's CPU generator, which is given beside."""
    now = read_states()
    return now[:-1] != before[:-1] or not torch.equal(now.torch, torch_before)


def _cuda_generator() -> torch.Generator:
    generator: torch.Generator = torch.cuda.default_generators[torch.cuda.current_device()]
    return generator


def seed_generators(*key: int | str) -> None:
    """Seed Python's, torch's (CPU and accelerator) and, where it is imported, numpy's global generator from a key."""
    number = derive_key(*key)
    random.seed(number)
    # not torch.manual_seed: until CUDA is initialised it keeps a queue with a stack trace of each call (90 us)
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch does not annotate it
        torch.cuda.manual_seed(number)
    if (np := sys.modules.get("numpy")) is not None:  # an import statement would take a microsecond
        np.random.seed(number & 0xFFFFFFFF)  # numpy's limit


@contextmanager
def fork_generators() -> Iterator[None]:
    """Restore the global generators behind the body, whatever it draws."""
    states = read_states()
    try:
        yield
    finally:
        restore(states)


def is_in_memory(dataset: Dataset[Any]) -> bool:
    """Whether its samples are torch's own views of tensors, which run none of the user's code."""
    if isinstance(dataset, Subset):
        return type(dataset) is Subset and is_in_memory(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return type(dataset) is ConcatDataset and all(map(is_in_memory, dataset.datasets))
    return type(dataset) is TensorDataset


class SeededSamples(Dataset[object]):
    """A data set whose random transforms draw the same for (seed, epoch, sample), in whichever worker of whichever
    rank.

    It is indexed by (epoch, sample), so that workers that outlive an epoch need no message about the next. Seeding
    takes longer than reading many a sample. So a batch, and before it the first sample of all, is read without, and
    read again with it if something was drawn. From then on every sample is seeded before it is read. Tensors in memory
    draw nothing.
    """

    def __init__(self, dataset: Dataset[Any], seed: int, *, collates: bool = False) -> None:
        """`collates`: whether the caller's own code makes a batch of the samples, and may draw for it."""
        self.dataset = dataset
        self.seed = seed
        self._collates = collates
        self._draws: bool | None = None  # None: no sample was read yet
        self._is_in_memory = is_in_memory(dataset)
        self._epoch: int | None = None
        self._epoch_key = 0
        self._epoch_state: Any = None  # of torch's generator, a tensor

    def __getitem__(self, draw: tuple[int, int]) -> object:
        return self.__getitems__([draw])[0]

    def __getitems__(self, draws: list[tuple[int, int]]) -> list[object]:
        """A whole batch, which is how a DataLoader asks when this method exists."""
        if self._is_in_memory:
            samples = self._fetch(draws)
        elif self._draws is None and len(draws) > 1:
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
            if self._draws is False:  # only torch's generator was moved, here
                torch.default_generator.set_state(before.torch)
            else:
                restore(before)

    def _read_unseeded(self, draws: list[tuple[int, int]], before: States) -> list[object] | None:
        """The samples of one epoch; None if something was drawn."""
        epoch = draws[0][0]
        if epoch != self._epoch:
            self._epoch, self._epoch_key = epoch, derive_key("samples", self.seed, epoch)
            torch.default_generator.manual_seed(self._epoch_key)
            self._epoch_state = torch.default_generator.get_state()
        else:  # a sample may read torch.initial_seed() without drawing: it gets the epoch's
            torch.default_generator.manual_seed(self._epoch_key)
        try:
            samples = self._fetch(draws)
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

    def _fetch(self, draws: list[tuple[int, int]]) -> list[object]:
        """Fetch samples as torch's loader does: all at once if the data set can."""
        if (fetch := getattr(self.dataset, "__getitems__", None)) is not None:
            return list(fetch([index for _, index in draws]))
        return [self.dataset[index] for _, index in draws]


class WorkerStart:
    """The worker_init_fn of every loader. `get_worker_info().dataset` is the user's data set, as it would be without
    SeededSamples. A forked worker's garbage collection leaves alone what it has from the rank: a process group or DDP
    of an earlier training that it destroyed there would end it with a segmentation fault, for their threads are not in
    the worker. A class, because workers that are not forked get it pickled."""

    def __init__(self, init: Callable[[int], object] | None) -> None:
        self._init = init

    def __call__(self, worker: int) -> None:
        gc.freeze()
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, SeededSamples):
            object.__setattr__(info, "dataset", info.dataset.dataset)  # torch lets nobody else set it
        if self._init is not None:
            self._init(worker)
