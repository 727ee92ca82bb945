"""The loss curve over all attempts of a run, while its files grow."""

from __future__ import annotations

import json
import os

import pytest

from hpcddp.runs.folder import AttemptFolder, RunFolder
from hpcddp.runs.metrics import LossCurve


@pytest.fixture
def run(tmp_path) -> RunFolder:
    return RunFolder(str(tmp_path))


def add(attempt: AttemptFolder, *steps: tuple[int, float | None]) -> None:
    os.makedirs(attempt.path, exist_ok=True)
    with open(attempt.metrics, "a", encoding="utf-8") as file:
        for step, loss in steps:
            file.write(json.dumps({"kind": "step", "step": step, "epoch": 0, "loss": loss, "time": 1.0}) + "\n")


def test_steps_that_are_made_again_count_once_as_they_were_made_last(run: RunFolder):
    first, second = run.attempt("41.1"), run.attempt("9.1")
    add(first, (1, 4.0), (2, 3.0), (3, 2.5), (4, 9.0))
    add(second, (3, 2.0), (4, 1.5))
    curve = LossCurve()
    curve.read([first, second])
    assert (list(curve.steps), list(curve.losses)) == ([1, 2, 3, 4], [4.0, 3.0, 2.0, 1.5])
    assert curve.made == {"41.1": (1, 4), "9.1": (3, 4)}


def test_it_grows_with_the_file_and_a_run_that_begins_again_drops_what_came_after(run: RunFolder):
    attempt = run.attempt("41.1")
    curve = LossCurve()
    curve.read([attempt])
    assert curve.sample(10) == []
    for loss in (4.0, 3.0):
        add(attempt, (len(curve.steps) + 1, loss))
        curve.read([attempt])
    assert list(curve.losses) == [4.0, 3.0]
    add(run.attempt("41.2"), (1, 5.0))
    curve.read([attempt, run.attempt("41.2")])
    assert list(curve.losses) == [5.0]


def test_a_loss_that_was_none_is_a_gap_between_the_others(run: RunFolder):
    attempt = run.attempt("41.1")
    add(attempt, (1, 1.0), (2, 2.0), (3, None), (4, 4.0), (5, 5.0))
    curve = LossCurve()
    curve.read([attempt])
    assert curve.sample(9) == [1.0, 2.0, 2.0, None, None, 4.0, 4.0, 5.0, 5.0]


def test_a_long_run_is_shown_by_the_means_of_its_steps_whatever_was_no_number(run: RunFolder):
    attempt = run.attempt("41.1")
    add(attempt, *((step, None if step in {2, 901} or 500 < step <= 600 else float(step)) for step in range(1, 1001)))
    curve = LossCurve()
    curve.read([attempt])
    sampled = curve.sample(10)
    assert sampled[5] is None
    known = [value for value in sampled if value is not None]
    assert known == sorted(known)
    assert sampled[0] == pytest.approx((sum(range(1, 101)) - 2) / 99)
