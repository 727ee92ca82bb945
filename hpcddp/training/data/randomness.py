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
from torch.utils.data import Dataset, Subset, TensorDataset, get_worker_info

from hpcddp.training.data.sampler import derive_key


class States(NamedTuple):
    """Python's, numpy's legacy one (None where numpy is not imported), the current CUDA device's as seed and offset
    (None where CUDA is not initialised), and torch's on the CPU."""

    python: Any
    numpy: Any
    cuda: tuple[int, int] | None
    torch: Tensor


def read_states() -> States:
    numpy, cuda = None, None
    if (np := sys.modules.get("numpy")) is not None:
        name, words, *rest = np.random.get_state()
        numpy = name, words.tobytes(), *rest
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch does not annotate it
        generator = _cuda_generator()
        cuda = generator.initial_seed(), generator.get_offset()
    return States(random.getstate(), numpy, cuda, torch.default_generator.get_state())


def restore(states: States) -> None:
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


def are_drawn_from(before: States) -> bool:
    """Whether a generator has changed since it had these states."""
    now = read_states()
    return now[:-1] != before[:-1] or not torch.equal(now.torch, before.torch)


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
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) is TensorDataset


class SeededSamples(Dataset[object]):
    """A data set whose random transforms draw the same for (seed, epoch, sample), in whichever worker of whichever
    rank.

    It is indexed by (epoch, sample), so that workers that outlive an epoch need no message about the next. Seeding
    takes longer than reading many a sample: until a batch has drawn something, each is read without, and that one is
    read again. From then on every sample is seeded before it is read.
    """

    def __init__(self, dataset: Dataset[Any], seed: int, *, collates: bool = False) -> None:
        """`collates`: whether the caller's own code makes a batch of the samples, and may draw for it."""
        self.dataset = dataset
        self.seed = seed
        self._collates = collates
        self._draws = False
        self._is_in_memory = is_in_memory(dataset)

    def __getitem__(self, draw: tuple[int, int]) -> object:
        return self.__getitems__([draw])[0]

    def __getitems__(self, draws: list[tuple[int, int]]) -> list[object]:
        """A whole batch, which is how a DataLoader asks when this method exists."""
        if self._is_in_memory:
            samples = self._fetch(draws)
        else:
            with fork_generators():
                samples = self._read(draws)
        if self._collates and get_worker_info() is not None:  # in the training process the step has seeded
            seed_generators("batch", self.seed, *draws[0])
        return samples

    def _read(self, draws: list[tuple[int, int]]) -> list[object]:
        if not self._draws:
            seed_generators("samples", self.seed, draws[0][0])  # a sample may read torch.initial_seed()
            before = read_states()
            samples = self._fetch(draws)
            self._draws = are_drawn_from(before)
        if self._draws:
            samples = [self._read_seeded(*draw) for draw in draws]
        return samples

    def _read_seeded(self, epoch: int, index: int) -> object:
        seed_generators("sample", self.seed, epoch, index)
        return self.dataset[index]

    def _fetch(self, draws: list[tuple[int, int]]) -> list[object]:
        """Fetch samples as torch's loader does: all at once if the data set can."""
        if (fetch := getattr(self.dataset, "__getitems__", None)) is not None:
            return list(fetch([index for _, index in draws]))
        return [self.dataset[index] for _, index in draws]


class WorkerStart:
    """The worker_init_fn of every loader; a class, because workers that are not forked get it pickled.

    `get_worker_info().dataset` is the user's data set. A forked worker's garbage collection leaves the rank's objects
    alone: destroying a process group or DDP there ends the worker with a segmentation fault.
    """

    def __init__(self, init: Callable[[int], object] | None) -> None:
        self._init = init

    def __call__(self, worker: int) -> None:
        gc.freeze()
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, SeededSamples):
            object.__setattr__(info, "dataset", info.dataset.dataset)  # torch lets nobody else set it
        if self._init is not None:
            self._init(worker)
