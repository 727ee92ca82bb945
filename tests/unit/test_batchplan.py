"""The arithmetic of the global batch, for any world size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.batchplan import plan_batch, split_evenly
from hpcddp.errors import RequestError

worlds = st.integers(1, 300)


@given(st.integers(0, 10_000), worlds)
def test_a_split_sums_to_its_total_and_its_parts_differ_by_at_most_one(total: int, parts: int) -> None:
    split = split_evenly(total, parts)
    assert sum(split) == total
    assert len(split) == parts
    assert max(split) - min(split) <= 1


@given(worlds, st.integers(0, 5_000), st.one_of(st.none(), st.integers(1, 64)))
def test_every_global_batch_of_a_sample_per_rank_works_with_every_largest_micro_batch(
    world: int, extra: int, micro: int | None
) -> None:
    plan = plan_batch(world + extra, world, micro)
    by_rank = [[piece.samples for piece in plan.pieces(rank)] for rank in range(world)]
    assert sum(map(sum, by_rank)) == world + extra
    assert {len(sizes) for sizes in by_rank} == {plan.accumulation_steps}
    for sizes in (by_rank[0], by_rank[world // 2], by_rank[-1]):
        assert max(sizes) <= plan.largest_micro_batch <= (micro or world + extra)
        assert 0 not in sizes[:-1]  # at most the last of them runs on a placeholder
    assert 0 < plan.utilisation <= 1


@pytest.mark.parametrize(
    ("global_batch", "world", "shares"),
    [(256, 32, {8}), (256, 6, {42, 43}), (100, 8, {12, 13}), (1000, 96, {10, 11}), (256, 7, {36, 37})],
)
def test_published_splits(global_batch: int, world: int, shares: set[int]) -> None:
    plan = plan_batch(global_batch, world)
    assert {plan.share(rank) for rank in range(world)} == shares


def test_the_plan_reads_as_a_product_where_it_is_one() -> None:
    assert str(plan_batch(256, 32)) == "256 = 32 ranks x 8 x 1"
    assert str(plan_batch(256, 8, max_micro_batch=16)) == "256 = 8 ranks x 16 x 2"
    assert str(plan_batch(256, 7)) == "256 = 7 ranks x 36 to 37 samples in 1 micro batch, 99% of the devices' time used"
    assert str(plan_batch(20, 2, 4)) == "20 = 2 ranks x 10 samples in 3 micro batches, 83% of the devices' time used"


def test_more_ranks_than_samples_is_refused_with_both_ways_out() -> None:
    with pytest.raises(RequestError) as refused:
        plan_batch(4, 8)
    assert "a global batch of 4 cannot be split over 8 ranks" in refused.value.message
    assert refused.value.hint == "use at most 4 ranks, or --global-batch 8 or more"


def test_a_rank_whose_share_has_fewer_samples_than_passes_runs_the_last_one_without_any() -> None:
    plan = plan_batch(41, 2, max_micro_batch=1)
    first, second = ([piece.samples for piece in plan.pieces(rank)] for rank in (0, 1))
    assert (len(first), second) == (21, [1] * 20 + [0])
