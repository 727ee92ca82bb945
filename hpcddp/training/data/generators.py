"""The states of the global generators: Python's, torch's and, where it is imported, numpy's legacy one.

A state is read to keep it, or to see whether anything was drawn. `random.getstate()` takes 20 us and
`numpy.random.get_state()` 100 us, so that the 2.5 KB are read where they lie, in 0.3 us. Where they do not lie as
expected, these functions are called instead.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
    return States(_read_python(), _kept_normal(), _read_numpy(), torch.default_generator.get_state(), _read_cuda())


def restore(states: States) -> None:
    """Put these states back."""
    if _kept_normal() != states.kept_normal or _read_python() != states.python:
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


def is_drawn_from(before: States, torch_before: bytes) -> bool:
    """Whether a generator changed. `before` are their states but for torch's CPU generator, which is given as bytes."""
    return (
        _read_python() != before.python
        or _kept_normal() != before.kept_normal
        or read_torch() != torch_before
        or not _is_numpy_at(before.numpy)
        or _read_cuda() != before.cuda
    )


def read_torch() -> bytes:
    """The state of torch's CPU generator."""
    state = torch.default_generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.numel())


def seed_numpy(number: int) -> None:
    """Seed numpy's generator, where numpy is imported, with the lower 32 bits, which is numpy's limit."""
    if (np := sys.modules.get("numpy")) is not None:  # an import statement would take a microsecond
        np.random.seed(number & 0xFFFFFFFF)


# ---- Python's


def _kept_normal() -> float | None:
    kept: float | None = getattr(random, "_inst", random).gauss_next
    return kept


def _read_python() -> Any:
    address = _python_address()
    return random.getstate() if address is None else ctypes.string_at(address, _BYTES)


@cache
def _python_address() -> int | None:
    """Where the index and the words of Python's generator lie; None if not as CPython's source has them."""
    generator = getattr(random, "_inst", None)
    size = object.__basicsize__
    if sys.implementation.name != "cpython" or generator is None or type(generator).__basicsize__ < size + _BYTES:
        return None
    address = id(generator) + size
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
    if "numpy" not in sys.modules:
        return None
    found = _read_numpy_bytes()
    if found is not None:
        return found
    import numpy as np

    return np.random.get_state()


def _is_numpy_at(before: Any) -> bool:
    if before is None or "numpy" not in sys.modules:
        return before is None and "numpy" not in sys.modules
    if isinstance(before, bytes):
        return _read_numpy_bytes() == before
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


def _read_numpy_bytes() -> bytes | None:
    """Its words, the index, whether it keeps a normal number, and that; None where they cannot be read."""
    find = getattr(sys.modules["numpy"].random, "get_bit_generator", None)  # numpy 1.24
    if find is None:
        return None
    bit_generator = find()
    if bit_generator is not _NUMPY.bit_generator:
        _find_numpy(bit_generator)
    if _NUMPY.words is None or _NUMPY.normal is None:
        return None
    kept = ctypes.string_at(_NUMPY.normal - 8, 4) + ctypes.string_at(_NUMPY.normal, 8)
    return ctypes.string_at(_NUMPY.words, _BYTES) + kept


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
    if _read_numpy_bytes() != state[1].astype(np.uint32).tobytes() + _PLACE_AND_NORMAL.pack(*state[2:]):
        _NUMPY.words = _NUMPY.normal = None


# ---- CUDA's


def _cuda_generator() -> torch.Generator:
    generator: torch.Generator = torch.cuda.default_generators[torch.cuda.current_device()]
    return generator


def _read_cuda() -> tuple[int, int] | None:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch does not annotate it
        return None
    generator = _cuda_generator()
    return generator.initial_seed(), generator.get_offset()
