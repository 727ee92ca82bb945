"""How often a run saves where the caller leaves it to it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcddp.training.checkpoint.files import list_checkpoint_folders
from hpcddp.training.checkpoint.interval import NODE_FAILURE_S, SaveInterval, choose_interval_s, estimate_loss

HOUR_S = 3600.0


def _expected_s(interval_s: float, save_s: float, failure_s: float) -> float:
    """Seconds that a second of training takes, with failures at random: Daly's equation 20 without the restart."""
    return failure_s * (math.exp((interval_s + save_s) / failure_s) - 1) / interval_s


@pytest.mark.parametrize("save_s", [0.1, 12.0, 300.0])
@pytest.mark.parametrize("failure_s", [3 * HOUR_S, 60 * 24 * HOUR_S])
def test_no_other_interval_loses_less_time(save_s: float, failure_s: float) -> None:
    chosen = choose_interval_s(save_s, failure_s)
    least = _expected_s(chosen, save_s, failure_s)
    others = [_expected_s(chosen * 1.01**n, save_s, failure_s) for n in range(-400, 400)]
    assert least - 1 <= (min(others) - 1) * 1.001
    assert estimate_loss(chosen, save_s, failure_s) == pytest.approx(least - 1, rel=0.2)


def test_saves_that_take_longer_than_nodes_last_come_once_per_failure() -> None:
    assert choose_interval_s(100.0, 50.0) == 50.0


def test_it_is_time_when_the_interval_since_the_last_save_is_over() -> None:
    now = [0.0]
    interval = SaveInterval(4, lambda: now[0])
    interval.expect(1.0)
    now[0] = 50.0
    interval.training_begins()
    assert interval.seconds == choose_interval_s(1.0, NODE_FAILURE_S / 4)
    now[0] += interval.seconds - 1
    assert not interval.is_due
    now[0] += 1
    assert interval.is_due
    interval.saved(4.0)
    interval.saved(6.0)
    assert interval.seconds == choose_interval_s(5.0, NODE_FAILURE_S / 4), "the measured ones, not the guess"
    assert not interval.is_due


def test_it_says_what_it_does_and_again_only_if_that_changes_much() -> None:
    interval = SaveInterval(4, lambda: 0.0)
    interval.expect(3.0)
    assert interval.describe() == (
        "save_every='auto': a checkpoint every 74 minutes, since a save may take 3 s and 4 nodes may fail once in"
        " 38 days; saves and lost steps would cost 0.13% of the time"
    )
    assert interval.describe() is None
    interval.saved(4.0)
    assert interval.describe() is None
    interval.saved(40.0)
    assert str(interval.describe()).startswith("save_every='auto': a checkpoint every 3 hours, since a save takes 22 s")


def test_all_ranks_save_when_rank_0_says_so(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    whole, saved = str(tmp_path / "whole"), str(tmp_path / "saved")
    argument = {"save_every": "auto", "epochs": 3, "run_dir": str(tmp_path / "run"), "out": saved}
    run_ranks("checkpoint_bodies:train", 2, {"epochs": 3, "out": whole}).check()
    outcome = run_ranks("checkpoint_bodies:train_on_nodes_that_hardly_last", 2, argument).check()
    steps = [int(path.name.removeprefix("step-")) for path in list_checkpoint_folders(tmp_path / "run/checkpoints")]
    assert len(steps) > 3
    assert steps[-1] == 9
    assert "save_every='auto': a checkpoint every " in outcome.outputs[0]
    assert "save_every='auto'" not in outcome.outputs[1]
    ours, theirs = (torch.load(path)["weights"][-1] for path in (saved, whole))
    assert all(map(torch.equal, ours, theirs))
