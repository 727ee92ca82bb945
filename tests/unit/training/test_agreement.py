"""What one rank alone asks of all, and ranks that go different ways."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RunRanks = Callable[..., Any]


def run(run_ranks: RunRanks, folder: Path, *argument: Any) -> tuple[Any, set[int]]:
    """What both ranks have found, and the steps of the checkpoints."""
    run_ranks("agreement_bodies:call_on_ranks", 2, [str(folder), *argument]).check()
    first, other = (json.loads((folder / f"{rank}.json").read_text()) for rank in range(2))
    assert first == other
    return first, {int(path.name[-8:]) for path in (folder / "run" / "checkpoints").glob("step-*")}


@pytest.mark.parametrize(
    ("what", "where", "ranks", "sharing", "found", "saved"),
    [
        ("stop", 1, [0], False, [3, "because", None], {3}),  # heard of one step later
        ("stop", 1, [0, 1], False, [2, "because", None], {2}),
        pytest.param("stop", 5, [1], True, [11, "because", None], {5, 10, 11}, marks=pytest.mark.slow),
        ("stop", 5, [0, 1], True, [6, "because", None], {5, 6}),
        pytest.param("finish_early", 1, [1], False, [3, None, "because"], {3}, marks=pytest.mark.slow),
        pytest.param("save", 1, [1], False, [24, None, None], {3, 5, 10, 11, 15, 20, 24}, marks=pytest.mark.slow),
        pytest.param("save", 1, [0, 1], False, [24, None, None], {2, 5, 10, 11, 15, 20, 24}, marks=pytest.mark.slow),
        ("save", "epoch", [1], False, [24, None, None], {5, 10, 11, 12, 15, 20, 24}),
        pytest.param("stop", "epoch", [1], False, [12, "because", None], {5, 10, 11, 12}, marks=pytest.mark.slow),
        ("no time for a tail", 1, [1], True, [11, "deadline", None], {5, 10, 11}),  # before the epoch's last step
        pytest.param("signal", "epoch", [1], False, [12, "SIGTERM", None], {5, 10, 11, 12}, marks=pytest.mark.slow),
        pytest.param(
            "stop", "after", [1], False, [24, "because", None], {5, 10, 11, 15, 20, 24}, marks=pytest.mark.slow
        ),
    ],
)
def test_what_one_rank_asks_for_all_ranks_do_at_one_step(
    run_ranks: RunRanks,
    tmp_path: Path,
    what: str,
    where: int | str,
    ranks: list[int],
    sharing: bool,
    found: list[Any],
    saved: set[int],
) -> None:
    assert run(run_ranks, tmp_path, what, where, ranks, sharing) == (found, saved)


@pytest.mark.parametrize(
    ("what", "where", "ranks", "text"),
    [
        (
            "break",
            "epoch",
            [0],
            "rank 0 left the loop over rt.epochs() by break or return, rank 1 ended epoch 1 of 2",
        ),
        pytest.param(
            "break",
            "epoch",
            [1],
            "rank 0 ended epoch 1 of 2, rank 1 left the loop over rt.epochs() by break or return",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "save_best",
            "epoch",
            [0],
            "rank 0 called rt.save_best(value), rank 1 ended epoch 1 of 2",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "save_model",
            "epoch",
            [0],
            "rank 0 called rt.save_model(path), rank 1 ended epoch 1 of 2",
            marks=pytest.mark.slow,
        ),
        ("save", "after", [1], "rank 0 ended the `with` body, rank 1 called rt.save()"),
    ],
)
def test_ranks_that_go_different_ways_are_named(
    run_ranks: RunRanks, tmp_path: Path, what: str, where: str, ranks: list[int], text: str
) -> None:
    outcome = run_ranks("agreement_bodies:call_on_ranks", 2, [str(tmp_path), what, where, ranks, False])
    assert outcome.statuses == [1, 1]
    assert f"the ranks went different ways: {text}" in "".join(outcome.outputs)
