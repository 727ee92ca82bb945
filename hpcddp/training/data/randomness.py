"""Random numbers that depend on what is computed, never on which process computes it or what it computed before.

Every micro batch and every sample gets a generator state from a key such as (seed, step, rank) or (seed, epoch,
sample). So there is no random state to save: a resumed run draws what the undisturbed one would have drawn.
"""

from __future__ import annotations

import ctypes
import gc
import random
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset, get_worker_info

from hpcddp.training.data.sampler import derive_key

# The states of the global generators: Python's, torch's and, where it is imported, numpy's legacy one.


_WORDS = 624  # of a Mersenne Twister's state, 32 bits each
_BYTES = 4 * (_WORDS + 1)  # with the index in it


class States(NamedTuple):
    """What `restore` needs. `python` and `numpy` are bytes, or what the generator's own function gives."""

    python: Any
    kept_normal: float | None  # random.gauss() makes two numbers and keeps one
    numpy: Any  # None where numpy is not imported
    torch: Tensor
    cuda: tuple[int, int] | None  # seed and offset of the current device; None where CUDA is not initialised


def read_states() -> States:
    """The states now. They are not copied where that takes long."""
    address = _python_address()
    python = random.getstate() if address is None else ctypes.string_at(address, _BYTES)
    cuda = _read_cuda() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]  # torch does not annotate it
    return States(python, _PYTHON.gauss_next, _read_numpy(), torch.default_generator.get_state(), cuda)


def restore(states: States) -> None:
    """Put these states back."""
    now = read_states()
    if now.kept_normal != states.kept_normal or now.python != states.python:
        python = states.python
        if isinstance(python, bytes):
            index, *words = struct.unpack(f"{_WORDS + 1}I", python)
            python = 3, (*words, index), states.kept_normal
        random.setstate(python)
    if states.numpy is not None:
        _restore_numpy(states.numpy)
    torch.default_generator.set_state(states.torch)
    if states.cuda is not None:
        generator = _cuda_generator()
        generator.manual_seed(states.cuda[0])
        generator.set_offset(states.cuda[1])


def is_drawn_from(before: States, torch_before: Tensor) -> bool:
    """Whether a generator changed. `before` are their states but for torch's CPU generator, which is given beside."""
    now = read_states()
    return (
        now.python != before.python
        or now.kept_normal != before.kept_normal
        or not torch.equal(now.torch, torch_before)
        or not (now.numpy == before.numpy if isinstance(now.numpy, bytes | None) else _is_numpy_at(before.numpy))
        or now.cuda != before.cuda
    )


# ---- Python's


_PYTHON: Any = getattr(random, "_inst", random)  # the generator that the module's functions draw from


@cache
def _python_address() -> int | None:
    """Where the index and the words of Python's generator lie; None if not as CPython's source has them."""
    size = object.__basicsize__
    if sys.implementation.name != "cpython" or _PYTHON is random or type(_PYTHON).__basicsize__ < size + _BYTES:
        return None
    address = id(_PYTHON) + size
    _, (*words, index), _ = random.getstate()
    return address if ctypes.string_at(address, _BYTES) == struct.pack(f"{_WORDS + 1}I", index, *words) else None


# ---- numpy's


class _Numpy:
    """Where the state of numpy's generator lies; None where that is not known."""

    bit_generator: Any = None  # whose addresses these are
    words: int | None = None  # and, after them, the index
    normal: int | None = None  # the normal number that it keeps, and, before it, whether it keeps one


_NUMPY = _Numpy()


def _read_numpy() -> Any:
    """Its words, the index, whether it keeps a normal number, and that, as bytes; else as numpy's own function says."""
    np = sys.modules.get("numpy")
    if np is None:
        return None
    find = getattr(np.random, "get_bit_generator", None)  # numpy 1.24
    if find is None:
        return np.random.get_state()
    bit_generator = find()
    if bit_generator is not _NUMPY.bit_generator:
        _find_numpy(bit_generator)
    if _NUMPY.words is None or _NUMPY.normal is None:
        return np.random.get_state()
    kept = ctypes.string_at(_NUMPY.normal - 8, 4) + ctypes.string_at(_NUMPY.normal, 8)
    return ctypes.string_at(_NUMPY.words, _BYTES) + kept


def _is_numpy_at(before: Any) -> bool:
    if before is None or "numpy" not in sys.modules:
        return before is None and "numpy" not in sys.modules
    if isinstance(before, bytes):
        return bool(_read_numpy() == before)
    import numpy as np

    now: Any = np.random.get_state()
    return bool((now[1] == before[1]).all() and now[2:] == before[2:])


def _restore_numpy(before: Any) -> None:
    if _is_numpy_at(before):
        return
    import numpy as np

    if isinstance(before, bytes):
        words = np.frombuffer(before, np.uint32, _WORDS)
        before = "MT19937", words, *_PLACE_AND_NORMAL.unpack_from(before, 4 * _WORDS)
    np.random.set_state(before)


_PLACE_AND_NORMAL = struct.Struct("=iid")


def _find_numpy(bit_generator: Any) -> None:
    """Set the addresses. That of the normal number is found in a generator of the same type that keeps a known one."""
    import numpy as np

    _NUMPY.bit_generator, _NUMPY.words, _NUMPY.normal = bit_generator, None, None
    if not isinstance(bit_generator, np.random.MT19937):
        return
    known, other = 1.2345678901234e-5, np.random.RandomState(0)
    state: Any = other.get_state()
    other.set_state((*state[:3], 1, known))
    size = type(other).__basicsize__
    offset = ctypes.string_at(id(other), size).find(struct.pack("=iid", 1, 0, known)) + 8
    generator = getattr(np.random.random, "__self__", None)  # the one that the module's functions draw from
    if offset < 8 or type(generator) is not type(other):
        return
    _NUMPY.words, _NUMPY.normal = int(bit_generator.ctypes.state_address), id(generator) + offset
    state = np.random.get_state()
    if _read_numpy() != state[1].astype(np.uint32).tobytes() + _PLACE_AND_NORMAL.pack(*state[2:]):
        _NUMPY.words = _NUMPY.normal = None


# ---- CUDA's


def _cuda_generator() -> torch.Generator:
    generator: torch.Generator = torch.cuda.default_generators[torch.cuda.current_device()]
    return generator


def _read_cuda() -> tuple[int, int]:
    generator = _cuda_generator()
    return generator.initial_seed(), generator.get_offset()


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
        self._is_plain = _is_plain(dataset)
        self._draws: bool | None = None  # None: no sample was read yet
        self._epoch: int | None = None
        self._epoch_key = 0
        self._epoch_state: Any = None  # of torch's generator, a tensor

    def __getitem__(self, draw: tuple[int, int]) -> object:
        return self.__getitems__([draw])[0]

    def __getitems__(self, draws: list[tuple[int, int]]) -> list[object]:
        """A whole batch, which is how a DataLoader asks when this method exists."""
        if self._is_plain:
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
        """As torch's loader: at once where the data set can."""
        if (fetch := getattr(self.dataset, "__getitems__", None)) is not None:
            return list(fetch([index for _, index in draws]))
        return [self.dataset[index] for _, index in draws]


def _is_plain(dataset: Any) -> bool:
    """Whether torch's own code takes its samples from tensors in memory, which draws nothing and takes less time than
    looking whether something was drawn."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) is TensorDataset


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
