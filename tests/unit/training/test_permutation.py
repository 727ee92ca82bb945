"""The computed order of an epoch."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.training.data.sampler import permute


@given(length=st.integers(1, 3000), seed=st.integers(0, 2**40), epoch=st.integers(0, 1000))
def test_the_order_holds_every_sample_exactly_once(length: int, seed: int, epoch: int) -> None:
    order = permute(torch.arange(length), length, seed, epoch)
    assert torch.equal(order.sort().values, torch.arange(length))


@given(length=st.integers(10**6, 10**9), seed=st.integers(0, 2**40), epoch=st.integers(0, 1000))
def test_of_a_billion_samples_no_two_have_one_place_and_each_is_known_without_the_rest(
    length: int, seed: int, epoch: int
) -> None:
    positions = torch.arange(0, length, length // 20_000)
    samples = permute(positions, length, seed, epoch)
    assert 0 <= int(samples.min()) <= int(samples.max()) < length
    assert len(samples.unique()) == len(positions)
    assert torch.equal(permute(positions[-1:], length, seed, epoch), samples[-1:])


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
