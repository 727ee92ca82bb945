"""How often a run saves where the caller leaves it to it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcddp.runs.folder import RunFolder
from hpcddp.runs.losses import Losses, note_loss, read_losses
from hpcddp.training.checkpoint.files import list_checkpoint_folders
from hpcddp.training.checkpoint.host_memory import free_memory
from hpcddp.training.checkpoint.interval import (
    BESIDE,
    NODE_FAILURE_S,
    USUAL,
    SaveInterval,
    choose_interval_s,
    estimate_loss,
)
from hpcddp.training.checkpoint.manifest import read_manifest

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
    interval = SaveInterval(4, clock=lambda: now[0])
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


def test_what_the_run_has_lost_counts_from_the_second_time_on() -> None:
    assumed = SaveInterval(4)
    assumed.expect(3.0)
    once, twice = SaveInterval(4, Losses(1, 10 * HOUR_S)), SaveInterval(4, Losses(2, 10 * HOUR_S))
    rarely = SaveInterval(4, Losses(2, 1000 * NODE_FAILURE_S))
    for interval in (once, twice, rarely):
        interval.expect(3.0)
    assert once.seconds == rarely.seconds == assumed.seconds
    assert twice.seconds == choose_interval_s(3.0, 5 * HOUR_S)
    assert "and the run has lost ranks 2 times in 10 hours of training; " in str(twice.describe())


def test_a_save_beside_the_training_is_tried_once_and_kept_if_it_holds_the_training_less() -> None:
    asked = []
    interval = SaveInterval(4, may_write_beside=lambda: asked.append(1) is None)
    assert interval.form is USUAL
    interval.saved(4.0)
    assert interval.form == BESIDE
    interval.saved(0.5, BESIDE)
    assert interval.form == BESIDE
    assert interval.seconds == choose_interval_s(0.5, NODE_FAILURE_S / 4)
    assert "since a save is written beside the training and holds it for 0.5 s" in str(interval.describe())
    interval.saved(20.0, BESIDE)
    assert interval.form is USUAL
    assert asked == [1]


def test_short_saves_and_hosts_without_room_stay_with_the_usual_form() -> None:
    short, full = SaveInterval(4, may_write_beside=lambda: True), SaveInterval(4, may_write_beside=lambda: False)
    short.saved(0.1)
    full.saved(100.0)
    assert short.form is full.form is USUAL


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    7 kB\n"}, 7 * 1024),
        (
            {
                "proc/meminfo": "MemAvailable:    7 kB\n",
                "proc/self/cgroup": "0::/job/step\n",
                "sys/fs/cgroup/job/memory.max": "1000\n",
                "sys/fs/cgroup/job/memory.current": "400\n",
                "sys/fs/cgroup/job/step/memory.max": "max\n",
                "sys/fs/cgroup/job/step/memory.current": "100\n",
            },
            600,
        ),
        (
            {
                "proc/meminfo": "MemAvailable:    7 kB\n",
                "proc/self/cgroup": "9:cpu:/\n4:memory:/slurm/job_7\n0::/\n",
                "sys/fs/cgroup/memory/slurm/job_7/memory.limit_in_bytes": "3000\n",
                "sys/fs/cgroup/memory/slurm/job_7/memory.usage_in_bytes": "500\n",
            },
            2500,
        ),
        ({}, None),
    ],
)
def test_the_free_memory_is_that_of_the_host_and_of_the_job(tmp_path: Path, files: dict[str, str], free: int | None):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert free_memory(tmp_path) == free


def test_the_losses_of_a_run_are_counted_over_its_attempts(tmp_path: Path) -> None:
    run = RunFolder(str(tmp_path))
    assert read_losses(run) == Losses()
    for number, took_s in enumerate((100, 50)):
        attempt = run.attempt(f"7.{number + 1}")
        for file, at in ((attempt.rank_environment(0), 1000), (attempt.metrics, 1000 + took_s)):
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            Path(file).touch()
            os.utime(file, (at, at))
    note_loss(attempt, "rank 2 was killed")
    assert read_losses(run) == Losses(1, 150.0)
    assert Path(attempt.lost).read_text() == "rank 2 was killed\n"


def test_it_says_what_it_does_and_again_only_if_that_changes_much() -> None:
    interval = SaveInterval(4, clock=lambda: 0.0)
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


def test_a_checkpoint_beside_the_training_is_written_by_all_ranks_once_rank_0_chooses_it(
    run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    whole, saved, run_dir = str(tmp_path / "whole"), str(tmp_path / "saved"), tmp_path / "run"
    argument = {"save_every": "auto", "epochs": 3, "run_dir": str(run_dir), "out": saved}
    run_ranks("checkpoint_bodies:train", 2, {"epochs": 3, "out": whole}).check()
    run_ranks("checkpoint_bodies:train_with_saves_that_seem_long", 2, {**argument, "stop_at": 5}).check()
    forms = [read_manifest(folder)["form"] for folder in list_checkpoint_folders(run_dir / "checkpoints")]
    assert forms[:2] == ["single", "async"]
    run_ranks("checkpoint_bodies:train_with_saves_that_seem_long", 2, argument).check()
    ours, theirs = (torch.load(path)["weights"][-1] for path in (saved, whole))
    assert all(map(torch.equal, ours, theirs))


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
