"""One vocabulary for how a model is split: what is asked for, checked against ranks and nodes without torch."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.errors import RequestError
from hpcddp.parallelism import DIMENSIONS, Split, check_goes_with, plan_split, read_parallel

HOSTS = [f"node{rank // 4}" for rank in range(16)]  # 4 ranks on each of 4 nodes
FILE, PYTHON, OPTION = "parallel in job.yaml", "hpcddp.runtime(parallel=…)", "--parallel"


def _plan(value: object, hosts: list[str] = HOSTS) -> Split:
    return plan_split(read_parallel(value, FILE), hosts)


def _refusal(value: object, hosts: list[str] = HOSTS, where: str = FILE) -> tuple[str, str]:
    with pytest.raises(RequestError) as caught:
        plan_split(read_parallel(value, where), hosts)
    return caught.value.message, caught.value.hint


def test_a_word_is_a_mesh() -> None:
    assert _plan("ddp") == Split("ddp", tuple((rank,) for rank in range(16)))
    assert _plan("fsdp") == _plan({"shard": -1}) == Split("fsdp", (tuple(range(16)),))
    assert _plan("hsdp") == _plan({"data": -1, "shard": 4})
    assert _plan({"data": -1}) == _plan("ddp")


def test_the_shards_of_hsdp_are_the_ranks_of_a_node_in_whatever_order_the_launcher_has_placed_them() -> None:
    assert _plan("hsdp", ["a", "b", "a", "b"]).rows == ((0, 2), (1, 3))


def test_ranks_that_compute_a_layer_together_have_one_data_rank() -> None:
    split = _plan({"data": 2, "shard": -1, "tensor": 2})
    assert split.rows == ((0, 1, 2, 3), (4, 5, 6, 7)), "data ranks, not ranks"
    assert (split.kind, split.data_size, split.tensor) == ("hsdp", 8, 2)


@pytest.mark.parametrize("value", ["pipeline", {"data": -1, "pipeline": 2}, "pipeline=2"], ids=str)
def test_a_pipeline_is_refused_with_the_job_that_has_one(value: object) -> None:
    message, hint = _refusal(value)
    assert "'pipeline'" in message
    for path in ("jobs/plain/pipeline.yaml", "docs/articles.md"):
        assert path in hint
        assert (Path(__file__).parents[2] / path).is_file()


def test_text_mapping_and_job_file_say_the_same() -> None:
    same = ["data=-1,shard=4", {"data": -1, "shard": 4}, {"shard": "4", "data": "-1"}]
    assert len({str(read_parallel(value, FILE)) for value in same}) == 1


@pytest.mark.parametrize(
    ("value", "what", "hint"),
    [
        ("fsdb", "'fsdb' is not known", "(did you mean 'fsdp'?); or a mesh: parallel: data=-1,shard=8"),
        ({"dat": 2}, "has no dimension 'dat'", "data, shard, tensor (did you mean 'data'?)"),
        ({"data": 0}, "data '0' is no number of ranks", "parallel: data=8; -1 takes all ranks left"),
        ({}, "names no dimension", "parallel: data=-1"),
        (7, "is a int, neither a word nor a mapping", "parallel: fsdp"),
        ({"data": -1, "shard": -1}, "data=-1,shard=-1 does not give 16 ranks", "parallel: fsdp"),
        ({"data": -1, "shard": 6}, "does not give 16 ranks", "parallel: fsdp"),
        ({"shard": 8}, "shard=8 does not give 16 ranks", "parallel: fsdp"),
        ({"data": -1, "tensor": 2}, "DDP over tensor parallel", "parallel: shard=-1,tensor=2"),
        ({"shard": -1, "tensor": 8}, "tensor 8 would be on node0 and node1", "parallel: fsdp; or"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_with_what_to_type(value: object, what: str, hint: str) -> None:
    message, advice = _refusal(value)
    assert what in message
    assert hint in advice


def test_hsdp_needs_as_many_ranks_on_each_node() -> None:
    message, _ = _refusal("hsdp", ["A", "A", "B"])
    assert "as many ranks on each node; there are 2 on A, 1 on B" in message


def test_tensor_parallel_leaves_a_node_where_it_is_asked_to() -> None:
    assert _plan({"shard": -1, "tensor": 8, "across_nodes": "true"}).tensor == 8


@pytest.mark.parametrize(
    ("where", "typed"),
    [(PYTHON, 'parallel="fsdp"'), (OPTION, "--parallel fsdp"), ("--set parallel", "--set parallel=fsdp")],
)
def test_a_hint_is_written_as_its_source_is(where: str, typed: str) -> None:
    assert _refusal("shard=8", where=where)[1] == typed


@given(
    st.dictionaries(st.sampled_from(DIMENSIONS), st.sampled_from([-1, 1, 2, 3, 4, 5, 6, 16]), min_size=1),
    st.booleans(),
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
)
def test_the_ranks_of_a_split_are_those_that_there_are(
    degrees: dict[str, int], across: bool, ranks_of_nodes: list[int]
) -> None:
    hosts = [f"node{node}" for node, ranks in enumerate(ranks_of_nodes) for _ in range(ranks)]
    try:
        split = plan_split(read_parallel({**degrees, "across_nodes": across}, OPTION), hosts)
    except RequestError:
        return
    assert split.data_size * split.tensor == len(hosts)
    assert sorted(rank for row in split.rows for rank in row) == list(range(split.data_size))


def test_text_says_across_nodes_too() -> None:
    assert read_parallel("shard = 8, across_nodes = true", OPTION).across_nodes
    assert _refusal("across_nodes=true", where=OPTION)[0] == "--parallel names no dimension"


@pytest.mark.parametrize("value", ["fsdp", "hsdp", {"shard": -1, "tensor": 2}], ids=str)
def test_exact_mode_is_refused_where_ranks_have_parts_of_the_layers(value: object) -> None:
    asked = read_parallel(value, PYTHON)
    split = plan_split(asked, HOSTS)
    if split.tensor == 1:
        check_goes_with(split, asked, exact=True)  # it makes them whole
    else:
        with pytest.raises(RequestError, match="exact mode needs whole layers") as caught:
            check_goes_with(split, asked, exact=True)
        assert caught.value.hint == 'parallel="fsdp"'
