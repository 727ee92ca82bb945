"""Random numbers that depend on what is computed, never on which process computes it or what it computed before.

Every micro batch and every sample gets a generator state from a key such as (seed, step, rank) or (seed, epoch,
sample). So there is no random state to save: a resumed run draws what the undisturbed one would have drawn.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils.data import Dataset

from hpcddp.training.samples.permutation import derive_key


def seed_generators(*key: int | str) -> None:
    """Seed Python's, torch's (CPU and accelerator) and, where it is imported, numpy's global generator from a key."""
    number = derive_key(*key)
    random.seed(number)
    # not torch.manual_seed: until CUDA is initialised it keeps a queue with a stack trace of each call (90 us)
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch does not annotate it
        torch.cuda.manual_seed(number)
    if "numpy" in sys.modules:
        import numpy as np

        np.random.seed(number & 0xFFFFFFFF)  # numpy's limit


@contextmanager
def kept_generators() -> Iterator[None]:
    """What is drawn inside leaves the CPU generators outside as they were."""
    np_random = sys.modules["numpy"].random if "numpy" in sys.modules else None
    states = random.getstate(), torch.get_rng_state(), np_random.get_state() if np_random else None
    try:
        yield
    finally:
        random.setstate(states[0])
        torch.set_rng_state(states[1])
        if np_random:
            np_random.set_state(states[2])


class SeededSamples(Dataset[object]):
    """A data set whose random transforms draw the same for (seed, epoch, sample), in whichever worker of whichever
    rank.

    It is indexed by (epoch, sample), so that workers that outlive an epoch need not be told of the next.
    """

    def __init__(self, dataset: Dataset[object], seed: int) -> None:
        self.dataset = dataset
        self.seed = seed

    def __getitem__(self, draw: tuple[int, int]) -> object:
        return self.__getitems__([draw])[0]

    def __getitems__(self, draws: list[tuple[int, int]]) -> list[object]:
        """A whole batch, which is how a DataLoader asks when this method exists."""
        samples = []
        with kept_generators():
            for epoch, index in draws:
                seed_generators("sample", self.seed, epoch, index)
                samples.append(self.dataset[index])
        return samples
