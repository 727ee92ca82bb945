"""A shuffled order that is computed, not stored: place -> sample, for any number of samples.

A balanced Feistel network over Z_a x Z_b (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002, method 3)
is a permutation of [0, a*b); places that land outside [0, length) walk on until they come home, so what is left is a
permutation of [0, length). With a and b next to the square root of the length, hardly any place has to walk. No array
as long as the data set ever exists: any stretch of the order of 10^9 samples costs microseconds, and so does going on
in the middle of an epoch.
"""

from __future__ import annotations

import hashlib
import math

from torch import Tensor

_ROUNDS = 8
_BITS_31 = 0x7FFFFFFF
_BITS_32 = 0xFFFFFFFF


def derive_key(*parts: int | str) -> int:
    """63 bits that depend on every part and on their order; the same on every machine and Python."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _hash(values: Tensor, key: int) -> Tensor:
    """31 well-mixed bits of each value. Every product stays below 2^63, where int64 arithmetic is exact."""
    h = (values & _BITS_31) ^ key
    for factor, shift in ((0x9E3779B1, 15), (0x85EBCA6B, 13), (0xC2B2AE35, 16)):
        h = (h * factor) & _BITS_32
        h = (h ^ (h >> shift)) & _BITS_31
    return h


def permute(places: Tensor, length: int, seed: int, epoch: int) -> Tensor:
    """The samples (int64, same shape) at these places (int64, each in [0, length)) of the epoch's order.

    The order depends on (seed, epoch, length) alone: not on the world size, and not on which places are asked for
    together.
    """
    if length < 2:
        return places.clone()
    a = math.isqrt(length - 1) + 1
    b = -(-length // a)
    keys = [derive_key("order", seed, epoch, i) & _BITS_31 for i in range(_ROUNDS)]

    def shuffle_once(values: Tensor) -> Tensor:
        left, right = values // b, values % b
        for i, key in enumerate(keys):
            if i % 2 == 0:
                left = (left + _hash(right, key)) % a
            else:
                right = (right + _hash(left, key)) % b
        return left * b + right

    samples = shuffle_once(places)
    while bool((outside := samples >= length).any()):
        samples[outside] = shuffle_once(samples[outside])
    return samples
