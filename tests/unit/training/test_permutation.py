"""The computed order of an epoch."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcddp.training.data import sampler
from hpcddp.training.data.sampler import permute


@given(length=st.integers(1, 3000), seed=st.integers(0, 2**40), epoch=st.integers(0, 1000))
def test_the_order_holds_every_sample_exactly_once(length: int, seed: int, epoch: int) -> None:
    order = permute(torch.arange(length), length, seed, epoch)
    assert torch.equal(order.sort().values, torch.arange(length))


def _undo(samples: torch.Tensor, length: int, seed: int, epoch: int) -> torch.Tensor:
    """sample -> position: each round backwards, and outside of [0, length) the walk backwards."""
    a = math.isqrt(length - 1) + 1
    b = -(-length // a)
    keys = [sampler.derive_key("order", seed, epoch, i) & sampler._BITS_31 for i in range(sampler._ROUNDS)]

    def unshuffle_once(values: torch.Tensor) -> torch.Tensor:
        left, right = values // b, values % b
        for i, key in reversed(list(enumerate(keys))):
            if i % 2 == 0:
                left = (left - sampler._hash(right, key)) % a
            else:
                right = (right - sampler._hash(left, key)) % b
        return left * b + right

    positions = unshuffle_once(samples)
    while bool((outside := positions >= length).any()):
        positions[outside] = unshuffle_once(positions[outside])
    return positions


@settings(max_examples=3 * settings.default.max_examples)
@given(length=st.integers(2, 10**9), seed=st.integers(0, 2**40), epoch=st.integers(0, 1000), data=st.randoms())
def test_of_a_billion_samples_each_has_one_place_since_the_way_back_exists(
    length: int, seed: int, epoch: int, data: Any
) -> None:
    positions = torch.tensor([0, length - 1, *(data.randrange(length) for _ in range(100))])
    samples = permute(positions, length, seed, epoch)
    assert int(samples.min()) >= 0
    assert int(samples.max()) < length
    assert torch.equal(_undo(samples, length, seed, epoch), positions)
    assert torch.equal(permute(positions[-1:], length, seed, epoch), samples[-1:]), "known without the rest"


def test_seed_and_epoch_each_change_the_order() -> None:
    positions = torch.arange(100)
    orders = {tuple(permute(positions, 100, seed, epoch).tolist()) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_the_order_never_changes_between_versions() -> None:
    """A run that was begun with an older version goes on with the same samples."""
    assert permute(torch.arange(10), 10, seed=1, epoch=0).tolist() == [2, 7, 6, 4, 9, 8, 1, 5, 3, 0]


def test_every_sample_comes_to_every_place_about_equally_often() -> None:
    length, epochs = 12, 600
    seen = torch.zeros(length, length)
    for epoch in range(epochs):
        seen[torch.arange(length), permute(torch.arange(length), length, 0, epoch)] += 1
    expected = epochs / length
    chi_square = ((seen - expected) ** 2 / expected).sum().item()
    assert chi_square < 200  # 121 degrees of freedom: beyond the 99.99th percentile
