"""The points of a sweep: their numbers, their values in the command, and what is no sweep."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.errors import RequestError
from hpcddp.sweep import MOST, check_axes, count_points, fill_point, find_point, format_point, read_axes

VALUES = st.lists(st.text("abc019.", min_size=1, max_size=3), min_size=1, max_size=4, unique=True)


@given(st.dictionaries(st.sampled_from(["lr", "seed", "model.dim"]), VALUES, min_size=1))
def test_every_combination_is_one_point_and_the_last_axis_changes_fastest(axes: dict[str, list[str]]) -> None:
    points = [find_point(axes, number) for number in range(1, count_points(axes) + 1)]
    assert points == [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def test_a_range_has_both_ends_and_a_step() -> None:
    assert read_axes({"seed": "1-3", "x": "0-100:50", "lr": ["0.1"]}, "sweep") == {
        "seed": ("1", "2", "3"),
        "x": ("0", "50", "100"),
        "lr": ("0.1",),
    }


def test_a_value_stands_where_its_name_does_and_nowhere_else() -> None:
    words = ["python", "t.py", "--lr={lr}", "{{lr}}", "${lr}", "{other}", "a{lr}b{lr}"]
    assert fill_point(words, {"lr": "0.1"}) == ["python", "t.py", "--lr=0.1", "{{lr}}", "${lr}", "{other}", "a0.1b0.1"]


def test_a_value_never_becomes_a_shells_code() -> None:
    words = ["bash", "-c", "python t.py --lr {lr}", "{lr}"]
    assert fill_point(words, {"lr": "$(rm x)"}) == ["bash", "-c", "python t.py --lr {lr}", "$(rm x)"]
    with pytest.raises(RequestError, match="does not stand in the command"):
        check_axes({"lr": ["1"]}, words[:3], ())


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        ("x", "not a mapping"),
        ({}, "not a mapping"),
        ({"lr": []}, "lr is not a list of values, each once"),
        ({"lr": ["0.1", "0.1"]}, "lr is not a list of values, each once"),
        ({"lr": ["a\nb"]}, "lr is not a list of values, each once"),
        ({"a b": ["1"]}, "is no name"),
        ({"seed": "1-99999"}, "10001 points"),
        ({"a": "1-200", "b": "1-200"}, "40000 points"),
        ({"seed": "3-1"}, "seed is not a list of values"),
    ],
)
def test_what_is_no_sweep(axes: object, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        read_axes(axes, "sweep in job.yaml")


def test_a_name_has_to_stand_in_the_command_or_be_a_key() -> None:
    check_axes({"lr": ["1"], "nodes": ["1"]}, ["t", "{lr}"], ("nodes",))
    with pytest.raises(RequestError, match=r"\{momentum\} does not stand in the command") as refused:
        check_axes({"momentum": ["1"]}, ["t"], ("nodes",))
    assert refused.value.hint == "--momentum {momentum} in the command"
    with pytest.raises(RequestError, match="the launch's own number"):
        check_axes({"rank": ["1"]}, ["t", "{rank}"], ())


def test_there_is_no_point_beyond_the_last() -> None:
    with pytest.raises(RequestError, match="index 3 is no point"):
        find_point({"lr": ["1", "2"]}, 3)
    assert format_point({"lr": "1", "seed": "2"}) == "lr=1 seed=2"
    assert MOST == 10000
