"""Which rank sees which sample, over stops and changes of the world size."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.batchplan import plan_batch
from hpcddp.errors import RequestError
from hpcddp.training.data.sampler import GlobalBatchSampler


@given(
    length=st.integers(1, 200),
    extra=st.integers(0, 39),
    world_size=st.integers(1, 40),
    max_micro=st.integers(1, 9),
)
def test_every_rank_has_the_same_micro_batches_and_their_sizes_sum_to_the_global_batch(
    length: int, extra: int, world_size: int, max_micro: int
) -> None:
    plan = plan_batch(world_size + extra, world_size, max_micro)
    ranks = [list(GlobalBatchSampler(length, plan, rank).micro_batches()) for rank in range(world_size)]
    for alike in zip(*ranks, strict=True):
        assert len({(micro.nth, micro.last, micro.total) for micro in alike}) == 1
        assert max(micro.samples for micro in alike) <= plan.largest_micro_batch
    assert sum(micro.samples for micros in ranks for micro in micros) == length


def test_thousands_of_resumes_on_other_ranks_take_every_place_once_up_to_a_billion_samples() -> None:
    """Places, not samples: that each place holds another sample is shown in test_permutation.py."""
    draw = random.Random(1)
    cases = 0
    while cases < 1500:
        global_batch = draw.choice([draw.randint(1, 40), draw.randint(1, 100_000)])
        length = int(10 ** draw.uniform(0, 9))
        steps = -(-length // global_batch)
        consumed = global_batch * draw.choice([0, steps // 2, max(steps - 2, 0), draw.randrange(steps)])
        for _ in range(3):  # a step or two, then other ranks
            world_size = draw.randint(1, min(global_batch, 24))
            plan = plan_batch(global_batch, world_size, draw.choice([None, draw.randint(1, global_batch)]))
            if plan.accumulation_steps > 50:
                continue
            for _ in range(draw.randint(1, 2)):
                taken = []
                for rank in range(world_size):
                    sampler = GlobalBatchSampler(length, plan, rank)
                    sampler.epoch, sampler.position = divmod(consumed, length)
                    for micro in sampler.micro_batches():
                        taken.append((micro.position, micro.samples))
                        if micro.last:
                            break
                place, expected = consumed % length, min(global_batch, length - consumed % length)
                for start, samples in sorted(piece for piece in taken if piece[1]):
                    assert start == place
                    place += samples
                assert place == consumed % length + expected
                consumed += expected
            cases += 1


def test_reading_ahead_consumes_nothing() -> None:
    sampler = GlobalBatchSampler(100, plan_batch(10, 1), 0)
    ahead = list(sampler.draws())
    assert (sampler.epoch, sampler.position) == (0, 0)
    assert list(sampler.draws()) == ahead


@pytest.mark.parametrize(("samples", "drop_last"), [(0, False), (9, True)])
def test_a_data_set_that_gives_no_batch_is_refused(samples: int, drop_last: bool) -> None:
    with pytest.raises(RequestError, match=f"has {samples} samples, and a global batch 10"):
        GlobalBatchSampler(samples, plan_batch(10, 1), 0, drop_last=drop_last)
