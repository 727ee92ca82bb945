"""A shuffled order that is computed, not stored: position -> sample, for any number of samples.

A balanced Feistel network over Z_a x Z_b (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002, method 3)
is a permutation of [0, a*b); positions that land outside [0, length) walk on until they come home, so what is left is a
permutation of [0, length). With a and b next to the square root of the length, hardly any position has to walk. No
array as long as the data set ever exists: any stretch of the order of 10^9 samples costs microseconds after a few
milliseconds per epoch, and so does resuming in the middle of one.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache

import torch
from torch import Tensor

_ROUNDS = 8
_WORTH_A_TABLE = 8  # positions asked for at once, times this: the entries of a table that is worth making
_BITS_31 = 0x7FFFFFFF
_BITS_32 = 0xFFFFFFFF


def derive_key(*parts: int | str) -> int:
    """63 bits that depend on every part and on their order; the same on every machine and Python."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _hash(values: Tensor, key: int) -> Tensor:
    """31 well-mixed bits of each value. Every product stays below 2^63, where int64 arithmetic is exact."""
    h = (values & _BITS_31) ^ key
    for factor, shift in ((0x9E3779B1, 15), (0x85EBCA6B, 13), (0xC2B2AE35, 16)):
        h = (h * factor) & _BITS_32
        h = (h ^ (h >> shift)) & _BITS_31
    return h


def permute(positions: Tensor, length: int, seed: int, epoch: int) -> Tensor:
    """The samples (int64, same shape) at these positions (int64, each in [0, length)) of the epoch's order.

    The order depends on (seed, epoch, length) alone: not on the world size, and not on which positions are asked for
    together.
    """
    if length < 2:
        return positions.clone()
    a = math.isqrt(length - 1) + 1
    b = -(-length // a)
    rounds = _tables(a, b, seed, epoch) if a <= _WORTH_A_TABLE * positions.numel() else None
    keys = _keys(seed, epoch)

    def shuffle_once(values: Tensor) -> Tensor:
        left = torch.div(values, b, rounding_mode="floor")
        right = values - left * b
        for i in range(_ROUNDS):
            if i % 2 == 0:
                left = _add(left, rounds[i][right] if rounds else _hash(right, keys[i]) % a, a)
            else:
                right = _add(right, rounds[i][left] if rounds else _hash(left, keys[i]) % b, b)
        return left * b + right

    samples = shuffle_once(positions)
    while bool((outside := samples >= length).any()):
        samples[outside] = shuffle_once(samples[outside])
    return samples


def _keys(seed: int, epoch: int) -> list[int]:
    return [derive_key("order", seed, epoch, i) & _BITS_31 for i in range(_ROUNDS)]


@lru_cache(maxsize=2)  # this epoch, and the one that loader processes may be reading already
def _tables(a: int, b: int, seed: int, epoch: int) -> list[Tensor]:
    """What each round adds to one half for every value that the other may have: looked up, it takes a fifth of the
    time.
    """
    halves = torch.arange(b), torch.arange(a)
    return [_hash(halves[i % 2], key) % (b if i % 2 else a) for i, key in enumerate(_keys(seed, epoch))]


def _add(some: Tensor, others: Tensor, modulus: int) -> Tensor:
    """(some + others) % modulus, of numbers below it."""
    total = some + others
    return torch.where(total >= modulus, total - modulus, total)
