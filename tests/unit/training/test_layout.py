"""Ranks with one data rank see the same samples and are counted once."""

from __future__ import annotations

import itertools

from hpcddp.training.parallel.layout import Layout


def test_every_rank_has_one_place_and_every_data_rank_as_many_ranks() -> None:
    for data_size, model_size in itertools.product((1, 2, 5), (1, 2, 3)):
        layouts = [Layout(rank, data_size * model_size, model_size) for rank in range(data_size * model_size)]
        assert {layout.data_size for layout in layouts} == {data_size}
        for layout in layouts:
            assert layout.rank in layout.ranks_of(layout.data_rank)
            assert layout.data_ranks[layout.data_rank] == layout.rank
            assert [other for other in layout.data_ranks if layouts[other].data_rank == layout.data_rank] == [
                layout.rank
            ]
        assert sum(layout.is_counted for layout in layouts) == data_size
