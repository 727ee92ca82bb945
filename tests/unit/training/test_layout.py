"""Ranks with one data rank see the same samples and are counted once."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.errors import RequestError
from hpcddp.training.parallel.layout import plan_layout


@given(st.integers(1, 6), st.lists(st.integers(1, 4), max_size=3))
def test_every_rank_has_one_place_and_every_data_rank_as_many_ranks(data_size: int, sizes: list[int]) -> None:
    mesh = [(f"dimension {nth}", size) for nth, size in enumerate(sizes)]
    model_size = math.prod(sizes)
    layouts = [plan_layout(rank, data_size * model_size, mesh) for rank in range(data_size * model_size)]
    assert {layout.data_size for layout in layouts} == {data_size}
    assert {layout.model_size for layout in layouts} == {model_size}
    for layout in layouts:
        assert layout.rank in layout.ranks_of(layout.data_rank)
        assert layout.data_ranks[layout.data_rank] == layout.rank
        assert [other for other in layout.data_ranks if layouts[other].data_rank == layout.data_rank] == [layout.rank]
    assert sum(layout.is_counted for layout in layouts) == data_size


def test_without_a_model_mesh_the_data_rank_is_the_rank() -> None:
    for rank in range(3):
        layout = plan_layout(rank, 3)
        assert (layout.data_rank, layout.data_size, layout.is_counted) == (rank, 3, True)


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ([("tensor", 3)], r"4 ranks cannot be divided into groups of 3 \(tensor 3\)"),
        ([("tensor", 0)], "mesh dimension tensor has size 0"),
        ([("data", 2)], "a dimension twice: data, data"),
    ],
)
def test_a_mesh_that_does_not_fit_the_ranks_is_refused(mesh: list[tuple[str, int]], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        plan_layout(0, 4, mesh)
