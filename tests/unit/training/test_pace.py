"""The time that another step and a safe end need, by a clock that the test turns."""

from __future__ import annotations

import pytest
import torch

from hpcddp.training.checkpoint.checkpointer import guess_save_s
from hpcddp.training.stopping import Pace, SignalFlag, StopWatch

MARGIN_S = Pace().needed_s()


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

    def step(self, *lengths_s: float) -> None:
        for seconds in lengths_s:
            self.clock.now += seconds
            self.pace.step_ended()

    def tail(self, seconds: float, *, early: bool = False) -> None:
        self.clock.now += seconds
        self.pace.tail_ended(early=early)

    def save(self, seconds: float) -> None:
        self.pace.save_began()
        self.clock.now += seconds
        self.pace.save_ended(seconds)
        self.pace.training_resumed()

    def needed_s(self, steps: int = 2, *, tail: bool = False) -> float:
        return self.pace.needed_s(steps, tail=tail) - MARGIN_S


def test_two_slow_steps_and_one_and_a_half_saves_have_to_fit() -> None:
    run = Run()
    run.step(1, 2, 3, 2)
    assert run.needed_s() == 2 * 3
    run.save(10)
    run.step(2)
    assert run.needed_s() == 2 * 3 + 15
    run.save(4)
    assert run.needed_s() == 2 * 3 + 15, "the slowest save counts"


def test_the_first_step_of_an_attempt_does_not_count_and_an_odd_one_is_forgotten_after_enough_others() -> None:
    run = Run()
    run.step(600)
    assert run.needed_s() == 0
    run.step(300, *[1] * 50)
    assert run.needed_s() == 600, "one of few may come again"
    run.step(*[1] * 50)
    assert run.needed_s() == 2
    run.step(*[5] * 10)
    assert run.needed_s() == 10, "steps that become slow are no exception"


def test_before_the_last_step_of_an_epoch_one_step_and_the_tail_have_to_fit_which_are_no_part_of_a_step() -> None:
    run = Run()
    run.step(1, 1, 1)
    assert [run.needed_s(), run.needed_s(1, tail=True), run.needed_s(0)] == [2, 1, 0], "the first tail is not known"
    run.tail(40)
    run.save(10)
    run.clock.now += 7  # whatever is between two epochs
    run.pace.step_began()
    run.step(1)
    assert [run.needed_s(), run.needed_s(1, tail=True), run.needed_s(0)] == [2 + 15, 41 + 15, 15]


def test_the_tail_of_the_attempt_before_holds_until_one_is_measured_and_then_the_longest_one() -> None:
    run = Run()
    lengths = []
    run.pace.expect_tail(60)
    for seconds in (0, 40, 30):
        lengths.append((run.needed_s(1, tail=True), run.pace.tail_is_long))
        run.pace.step_began()
        run.pace.step_ended()
        run.tail(seconds)
        run.pace.expect_tail(60)
    assert lengths == [(60, True), (0, False), (40, True)]
    assert run.needed_s(1, tail=True) == 40


def test_an_epoch_that_ends_early_may_do_so_again_after_any_step() -> None:
    run = Run()
    run.step(1)
    run.clock.now += 1
    run.pace.loop_left()
    run.clock.now += 40
    run.pace.step_ended(in_tail=True)
    run.tail(0, early=True)
    assert [run.needed_s(), run.needed_s(1, tail=True), run.needed_s(0)] == [42, 41, 0]


@pytest.mark.parametrize(("seconds", "is_long"), [(None, True), (5.0, False), (5.1, True)])
def test_a_checkpoint_comes_before_a_tail_of_more_than_5_s_or_that_is_not_known(
    seconds: float | None, is_long: bool
) -> None:
    pace = Pace()
    pace.expect_tail(seconds)
    assert pace.tail_is_long == is_long


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
    assert watch.flags() == ()
    now.now += 0.001
    assert watch.flags() == ("deadline",)
    assert StopWatch(SignalFlag(), None, run.pace, now).flags() == ()


def test_a_first_save_is_taken_to_write_three_times_the_model_at_100_mb_per_second() -> None:
    model = torch.nn.Linear(1024, 1024, bias=False)  # 4 MiB
    assert guess_save_s([model]) == 3 * 2**22 / 1e8
