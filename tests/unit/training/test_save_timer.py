"""How often a run saves by time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcddp.training.arguments import SaveEvery, read_save_every
from hpcddp.training.checkpoint.files import list_checkpoint_folders
from hpcddp.training.options import RuntimeOptions
from hpcddp.training.stopping import SaveTimer


def test_a_save_is_due_when_the_interval_since_the_last_one_is_over() -> None:
    now = [0.0]
    timer = SaveTimer(60, clock=lambda: now[0])
    now[0] = 50.0
    timer.restart()
    now[0] += 59.0
    assert not timer.is_due
    now[0] += 1.0
    assert timer.is_due
    timer.restart()
    assert not timer.is_due


@pytest.mark.parametrize(
    ("save_every", "seconds", "at_epoch_ends"),
    [(None, 600, True), (50, None, False), ("90s", 90, False), ("1:30:00", 5400, False)],
    ids=str,
)
def test_by_default_each_epoch_ends_with_a_save_and_ten_minutes_do(
    save_every: object, seconds: int | None, at_epoch_ends: bool
) -> None:
    options = RuntimeOptions(save_every=read_save_every(save_every, "{}"))
    assert (options.save_s, options.saves_at_epoch_ends) == (seconds, at_epoch_ends)


def test_a_number_of_steps_is_no_time() -> None:
    assert read_save_every(7, "{}") == SaveEvery(steps=7)


def test_all_ranks_save_when_the_time_of_rank_0_is_over(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    whole, saved = str(tmp_path / "whole"), str(tmp_path / "saved")
    argument = {"save_every": "10m", "epochs": 3, "run_dir": str(tmp_path / "run"), "out": saved}
    run_ranks("checkpoint_bodies:train", 2, {"epochs": 3, "out": whole}).check()
    run_ranks("checkpoint_bodies:train_with_a_save_due_after_each_step", 2, argument).check()
    steps = [int(path.name.removeprefix("step-")) for path in list_checkpoint_folders(tmp_path / "run/checkpoints")]
    assert len(steps) > 3
    assert steps[-1] == 9
    ours, theirs = (torch.load(path)["weights"][-1] for path in (saved, whole))
    assert all(map(torch.equal, ours, theirs))
