"""What one rank alone asks of all, and ranks that go different ways."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RunRanks = Callable[..., Any]
Case = tuple[str, "int | str", list[int]]

#: what, in which step or behind what, on which ranks; what came of it, and the steps of the checkpoints
TOGETHER: list[tuple[Case, list[Any], set[int]]] = [
    (("stop", 1, [0]), [3, "because", None], {3}),  # heard of one step later
    (("stop", 1, [0, 1]), [2, "because", None], {2}),
    (("save", "epoch", [1]), [24, None, None], {5, 10, 11, 12, 15, 20, 24}),
    (("no time for a tail", 1, [1]), [11, "deadline", None], {5, 10, 11}),  # before the epoch's last step
]
MORE: list[tuple[Case, list[Any], set[int]]] = [
    (("finish_early", 1, [1]), [3, None, "because"], {3}),
    (("save", 1, [1]), [24, None, None], {3, 5, 10, 11, 15, 20, 24}),
    (("save", 1, [0, 1]), [24, None, None], {2, 5, 10, 11, 15, 20, 24}),
    (("stop", "epoch", [1]), [12, "because", None], {5, 10, 11, 12}),
    (("signal", "epoch", [1]), [12, "SIGTERM", None], {5, 10, 11, 12}),
    (("stop", "after", [1]), [24, "because", None], {5, 10, 11, 15, 20, 24}),
]
APART: list[tuple[Case, str]] = [
    (("break", "epoch", [0]), "rank 0 left the loop over rt.epochs(), rank 1 ended epoch 1"),
    (("break", "epoch", [1]), "rank 0 ended epoch 1 of 2, rank 1 left the loop over rt.epochs()"),
    (("save_best", "epoch", [0]), "rank 0 called rt.save_best(value), rank 1 ended epoch 1 of 2"),
    (("save_model", "epoch", [0]), "rank 0 called rt.save_model(path), rank 1 ended epoch 1 of 2"),
    (("save", "after", [1]), "rank 0 ended the `with` body, rank 1 called rt.save()"),
]


def run(run_ranks: RunRanks, folder: Path, cases: list[Case]) -> list[Any]:
    """What both ranks have found."""
    run_ranks("agreement_bodies:call_on_ranks", 2, {"folder": str(folder), "cases": cases}).check()
    first, other = (json.loads((folder / f"{rank}.json").read_text()) for rank in range(2))
    assert first == other
    return list(first)


@pytest.mark.parametrize("rows", [TOGETHER, pytest.param(MORE, marks=pytest.mark.slow)], ids=["quick", "slow"])
def test_what_one_rank_asks_for_all_ranks_do_at_one_step(
    run_ranks: RunRanks, tmp_path: Path, rows: list[tuple[Case, list[Any], set[int]]]
) -> None:
    found = run(run_ranks, tmp_path, [case for case, *_ in rows])
    for nth, (case, expected, saved) in enumerate(rows):
        assert found[nth] == expected, case
        steps = {int(path.name[-8:]) for path in (tmp_path / str(nth) / "checkpoints").glob("step-*")}
        assert steps == saved, case


def test_ranks_that_go_different_ways_are_named(run_ranks: RunRanks, tmp_path: Path) -> None:
    found = run(run_ranks, tmp_path, [case for case, _ in APART])
    for told, (case, words) in zip(found, APART, strict=True):
        assert f"the ranks went different ways: {words}" in told, case
