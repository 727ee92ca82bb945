"""The round trip: what a launcher is predicted to set resolves to the layout that it was predicted from."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.errors import RequestError
from hpcddp.ranks.launcher import NUMBERS
from hpcddp.ranks.launchers import LAUNCHER_NAMES, LAUNCHERS
from hpcddp.ranks.predict import predict_environment

from .captured import resolve

REAL = [name for name in LAUNCHER_NAMES if name != "none"]
layouts = st.lists(st.integers(1, 9), min_size=1, max_size=6)


@given(st.sampled_from(REAL), layouts, st.data())
def test_resolving_a_predicted_environment_gives_the_layout_back(
    launcher: str, tasks: list[int], data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, sum(tasks) - 1))
    hosts = [f"node{i}" for i in range(len(tasks))]
    node = next(i for i in range(len(tasks)) if rank < sum(tasks[: i + 1]))
    truth = (rank, sum(tasks), rank - sum(tasks[:node]), tasks[node], node, len(tasks))
    env = predict_environment(launcher, hosts, tasks, rank)
    found = resolve(env, hostname=hosts[node])
    assert found.launcher == launcher
    for number, told, true in zip(NUMBERS, found[1:7], truth, strict=True):
        assert told in (None, true)
        assert told is not None or not getattr(LAUNCHERS[launcher], number)


def test_a_launcher_that_is_none_is_refused() -> None:
    with pytest.raises(RequestError):
        predict_environment("nope", 1, 1, 0)
