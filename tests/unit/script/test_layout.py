"""Where ranks will be, and that a rank launched there finds itself there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.cli.layout import format_layout, predict_rank
from hpcddp.ranks.launch import Launch
from hpcddp.script.jobplan import Placement, list_placements

from .conftest import plan

LAUNCHERS = [
    ("generic-slurm", "srun"),
    *(("generic-pbs", name) for name in ("openmpi", "mpich", "intelmpi", "torchrun")),
]


@pytest.mark.parametrize(("site", "launcher"), LAUNCHERS)
@given(nodes=st.integers(1, 6), ranks_per_node=st.integers(1, 9))
def test_a_rank_that_finds_what_was_predicted_is_the_rank_of_the_plan(site, launcher, nodes, ranks_per_node):
    job = plan(site, launcher=launcher, nodes=str(nodes), ranks_per_node=str(ranks_per_node))
    for place in list_placements(job):
        found = Launch(predict_rank(job, place), None, live=False).info
        assert (found.launcher, found.rank, found.world_size) == (launcher, place.rank, job.world_size)
        assert found.local_rank == place.local_rank
        assert found.node_rank in {None, place.node_rank}
        assert found.num_nodes in {None, nodes}
        assert found.local_world_size == ranks_per_node


def test_ranks_fill_a_node_before_the_next_and_take_a_gpu_each():
    places = list(list_placements(plan("abci3", nodes="3")))
    assert len(places) == 24
    assert places[0] == Placement(rank=0, node_rank=0, local_rank=0, gpu=0, cpus=24, gpus=(0,))
    assert places[17] == Placement(rank=17, node_rank=2, local_rank=1, gpu=1, cpus=24, gpus=(1,))


def test_the_table_has_a_row_per_rank_and_names_the_launchers_variables():
    lines = format_layout(plan("abci3", nodes="3")).splitlines()
    assert lines[0].startswith("train on abci3: 3 x 8 = 24 ranks for 01:00:00, 24 hardware threads each")
    assert [line.split() for line in lines[3:27]][17] == ["17", "2", "1", "1", "24"]
    assert "  OMPI_COMM_WORLD_RANK=23" in lines


def test_a_launcher_that_calls_another_one_tells_nothing_of_its_own():
    lines = format_layout(plan("stampede3", nodes="3", walltime="1h")).splitlines()
    assert lines[-1].startswith("ibrun calls intelmpi, openmpi, mvapich or mpich, whose variables the ranks have")
