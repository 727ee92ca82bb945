"""The sums of exact mode: one result, whoever holds which slice."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.errors import RequestError
from hpcddp.training.gradient.exact import IntegerSum, Reducer, TreeSum, fold_pairs, make_sum
from hpcddp.training.parallel.layout import Layout

ALONE = Reducer(Layout(0, 1))


def _tree_by_hand(values: list[float]) -> float:
    while len(values) > 1:
        pairs = [a + b for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + values[len(pairs) * 2 :]
    return values[0]


def _total(total: TreeSum | IntegerSum, slices: list[torch.Tensor]) -> torch.Tensor:
    """The sum over the slices (count, n) on one rank."""
    total.clear()
    for values in slices[:-1]:
        total.add([values.clone()])
    last = slices[-1].clone()
    return total.total([0], [last], last)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40))
def test_slice_after_slice_gives_the_same_tree_as_all_at_once(values: list[float]) -> None:
    slices = [torch.tensor([value], dtype=torch.float64) for value in values]
    assert _total(TreeSum(ALONE), slices).item() == _tree_by_hand(values)
    assert fold_pairs(torch.stack(slices)).item() == _tree_by_hand(values)


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=24), st.randoms(use_true_random=False))
def test_integers_give_one_sum_in_any_order_and_a_close_one(values: list[float], random: object) -> None:
    slices = [torch.tensor([value, 1.0]) for value in values]
    total = _total(IntegerSum(ALONE, 24), slices)
    random.shuffle(slices)
    assert torch.equal(_total(IntegerSum(ALONE, 24), slices), total)
    assert total[0].item() == pytest.approx(math.fsum(values), rel=1e-6, abs=1e-3)


@pytest.mark.parametrize("scale", [1e-38, 1e-20, 1.0, 1e30])
def test_integers_keep_their_digits_at_any_magnitude(scale: float) -> None:
    generator = torch.Generator().manual_seed(1)
    slices = [torch.randn(50, generator=generator) * scale for _ in range(8)]
    expected = torch.stack(slices).double().sum(0)
    found = _total(IntegerSum(ALONE, 8), slices).double()
    assert float((found - expected).abs().max()) <= 1e-6 * scale


def test_the_largest_possible_integer_sum_does_not_overflow() -> None:
    for count in (1, 2, 8, 127, 128, 1000):
        slices = [torch.ones(3, dtype=torch.float64)] * count
        assert _total(IntegerSum(ALONE, count), slices).tolist() == [count] * 3


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_shows_in_the_integer_sum(bad: float) -> None:
    slices = [torch.tensor([1.0, 2.0]), torch.tensor([bad, 2.0]), torch.tensor([1.0, 2.0])]
    assert _total(IntegerSum(ALONE, 3), slices).isnan().all()


def test_a_tensor_keeps_its_own_grid_and_memory_order() -> None:
    small = torch.full((2, 3, 2, 2), 1e-20).contiguous(memory_format=torch.channels_last)
    small[0, 1, 0, 1] = 3e-20
    large = torch.tensor([1e20])
    total = IntegerSum(ALONE, 2)
    total.add([small.clone(), large.clone()])
    last = [small.clone(), large.clone()]
    total.total([0, 1], last, last[0])
    assert torch.allclose(last[0], 2 * small, rtol=1e-6, atol=0)
    assert last[1].item() == pytest.approx(2e20)


@pytest.mark.parametrize(("world_size", "slices"), [(3, 8), (2, 6), (5, 24), (8, 24)])
def test_a_tree_that_others_would_grow_differently_is_refused_with_the_numbers_that_fit(
    world_size: int, slices: int
) -> None:
    with pytest.raises(RequestError, match="power of two") as refused:
        make_sum("tree", Reducer(Layout(0, world_size)), slices)
    assert "integer" in refused.value.hint
    assert str(world_size) not in refused.value.hint.split("ranks")[0].split(" or ")


@given(st.integers(1, 8), st.integers(0, 4), st.integers(1, 5))
def test_ranks_with_a_power_of_two_of_slices_grow_the_tree_of_one_rank(world: int, power: int, size: int) -> None:
    """What the ranks do, one after the other: each its own slices, then the ranks' sums in order."""
    generator = torch.Generator().manual_seed(world * 100 + power)
    each = 2**power
    slices = list(torch.randn(world * each, size, generator=generator))
    ranks = [_total(TreeSum(ALONE), slices[r * each : (r + 1) * each]) for r in range(world)]
    assert torch.equal(fold_pairs(torch.stack(ranks)), _total(TreeSum(ALONE), slices))
