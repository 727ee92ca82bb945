"""The time that another step and a safe end need, by a clock that the test turns."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest
import torch

from hpcddp.errors import LaunchError
from hpcddp.training.checkpoint.checkpointer import guess_save_s
from hpcddp.training.checkpoint.tracked import Tracked
from hpcddp.training.pace import Pace
from hpcddp.training.stopping import SignalFlag, StopWatch

MARGIN_S = Pace().needed_s(100)
FAR = 1000  # steps until the epoch's end


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


class Run:
    """Steps, saves and epoch ends of given lengths."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.pace = Pace(self.clock)
        self.pace.step_began()

    def step(self, *lengths_s: float, last: bool = False) -> None:
        for seconds in lengths_s:
            self.clock.now += seconds
            self.pace.step_ended(last=last)

    def save(self, seconds: float) -> None:
        self.pace.save_began()
        self.clock.now += seconds
        self.pace.save_ended(seconds)
        self.pace.training_resumed()

    def needed_s(self, steps_left: int = FAR) -> float:
        return self.pace.needed_s(steps_left) - MARGIN_S


def test_two_slow_steps_and_one_and_a_half_saves_have_to_fit() -> None:
    run = Run()
    run.step(1, 2, 3, 2)
    assert run.needed_s() == 2 * 3
    run.save(10)
    run.step(2)
    assert run.needed_s() == 2 * 3 + 15
    run.save(4)
    assert run.needed_s() == 2 * 3 + 15, "the slowest save counts"


def test_the_first_step_of_an_attempt_does_not_count() -> None:
    run = Run()
    run.step(600)
    assert run.needed_s() == 0
    run.step(1, 1)
    assert run.needed_s() == 2


def test_an_odd_step_is_forgotten_when_there_were_enough_others() -> None:
    run = Run()
    run.step(1, 300, *[1] * 50)
    assert run.needed_s() == 600, "one of few may come again"
    run.step(*[1] * 50)
    assert run.needed_s() == 2
    run.step(*[5] * 10)
    assert run.needed_s() == 10, "steps that become slow are no exception"


def test_a_save_and_the_end_of_an_epoch_are_no_part_of_a_step() -> None:
    run = Run()
    run.step(1, 1, 1, last=True)
    run.clock.now += 40  # evaluation
    run.pace.epoch_ended()
    run.save(10)
    run.clock.now += 7  # whatever is between two epochs
    run.pace.step_began()
    run.step(1)
    assert run.needed_s() == 2 + 15


def test_the_end_of_the_epoch_has_to_fit_if_it_is_reached_before_the_ranks_agree() -> None:
    run = Run()
    run.step(1, 1)
    run.step(1, last=True)
    run.clock.now += 40
    run.pace.epoch_ended()
    run.pace.step_began()
    run.step(1)
    assert [run.needed_s(left) for left in (3, 2, 1, 0)] == [2, 2, 42, 42]


def test_an_unmeasured_save_is_taken_for_what_was_expected_and_then_for_what_it_was() -> None:
    run = Run()
    run.pace.expect_save(100)
    assert run.needed_s() == 150
    run.save(4)
    assert run.needed_s() == 6
    run.pace.expect_save(100)
    assert run.needed_s() == 6


def test_what_is_still_being_written_has_to_end_before_the_last_save() -> None:
    run = Run()
    run.save(10)
    run.pace.save_began()
    run.pace.training_resumed()
    assert run.needed_s() == 1.5 * (10 + 10)
    run.clock.now += 4
    assert run.needed_s() == 1.5 * (6 + 10)
    run.clock.now += 16  # slower than any before
    assert run.needed_s() == 1.5 * 20
    run.pace.save_ended(25)
    assert run.needed_s() == 1.5 * 25


def test_a_deadline_is_near_when_what_is_needed_does_not_fit() -> None:
    run = Run()
    run.step(1, 3)
    now = Clock()
    watch = StopWatch(SignalFlag(), now() + 6 + MARGIN_S, run.pace, now)
    assert watch.flags(FAR) == ()
    now.now += 0.001
    assert watch.flags(FAR) == ("deadline",)
    assert StopWatch(SignalFlag(), None, run.pace, now).flags(FAR) == ()


def test_a_first_save_is_guessed_from_the_bytes_that_it_will_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcddp.training.checkpoint.checkpointer.time_probe", lambda path: 0.5)  # for 4 MiB
    model = torch.nn.Linear(1024, 1024, bias=False)  # 4 MiB
    optimizer = torch.optim.AdamW(model.parameters())
    assert guess_save_s(tmp_path, Tracked({"model": model})) == pytest.approx(0.5 * 2)
    expected = pytest.approx(0.5 * 4, rel=1e-4)  # two numbers per parameter are still to come
    assert guess_save_s(tmp_path, Tracked({"model": model, "optimizer": optimizer})) == expected
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    assert guess_save_s(tmp_path, Tracked({"model": model, "optimizer": optimizer})) == expected


def test_a_disk_that_is_full_at_the_first_guess_is_told_in_two_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(LaunchError, match=rf"{tmp_path} cannot be written: no space left on device\nhint: make room"):
        guess_save_s(tmp_path, Tracked({"model": torch.nn.Linear(2, 2)}))
    assert list(tmp_path.iterdir()) == []


def test_a_handler_of_the_scripts_own_is_said_once() -> None:
    said: list[str] = []
    signals = SignalFlag()
    watch = StopWatch(signals, None, warn=said.append)
    with signals.installed():
        watch.flags(FAR)
        assert not said
        signal.signal(signal.SIGUSR1, lambda *_: None)
        for _ in range(100):
            watch.flags(FAR)
    assert len(said) == 1
    assert "handler of its own for SIGUSR1 in the runtime's body" in said[0]
