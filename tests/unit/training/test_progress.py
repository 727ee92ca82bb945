"""The progress of a training as text, and when it is printed."""

from __future__ import annotations

import io
import math

import pytest

from hpcddp.errors import RequestError
from hpcddp.runs.hang import read_seconds_or_off
from hpcddp.training.report import Progress


class Clock:
    def __init__(self) -> None:
        self.at = 1000.0
        self.looks = 0

    def __call__(self) -> float:
        self.looks += 1
        return self.at


class Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_log_gets_a_line_per_interval_with_its_rate_and_the_end_that_the_job_has_now() -> None:
    out, clock, ends = io.StringIO(), Clock(), [2000.0]
    progress = Progress(out, interval_s=30, deadline=lambda: ends[0], clock=clock)
    progress.total_steps = 1000
    for step in range(101, 181):  # resumed; 1 s each, from step 141 on 2 s each
        progress.step(step, 8, 0.5)
        clock.at += 1.0 if step < 141 else 2.0
        ends[0] = 2000 if step < 160 else 1500  # somebody has moved it: qalter, scontrol update
    assert out.getvalue().splitlines() == [
        "hpcddp: step 131/1000  loss 0.5  8 samples/s  00:14:29 left  walltime left 00:16:10",
        "hpcddp: step 151/1000  loss 0.5  5.3 samples/s  00:16:58 left  walltime left 00:15:40",
        "hpcddp: step 166/1000  loss 0.5  4 samples/s  00:19:14 left  walltime left 00:06:50",
    ]


@pytest.mark.parametrize(
    ("samples", "loss", "line"),
    [
        (8, None, "step 2  8 samples/s"),
        (1, math.nan, "step 2  loss nan  1 samples/s"),
        (1234567, 1.0, "step 2  loss 1  1,234,567 samples/s"),
    ],
)
def test_what_is_not_known_is_left_out(samples: int, loss: float | None, line: str) -> None:
    out, clock = io.StringIO(), Clock()
    progress = Progress(out, interval_s=1, clock=clock)
    progress.step(1, samples, loss)
    clock.at += 1
    progress.step(2, samples, loss)
    assert out.getvalue() == f"hpcddp: {line}\n"


def test_an_output_that_is_gone_ends_the_lines_and_not_the_training() -> None:
    clock = Clock()
    progress = Progress(Broken(), interval_s=1, clock=clock)
    for step in range(1, 10):
        progress.step(step, 8)
        clock.at += 1
    looks = clock.looks
    progress.step(10, 8)
    assert clock.looks == looks + 1


def test_the_interval_is_settable() -> None:
    for text, seconds in (("", 30.0), ("0.5", 0.5), ("off", None)):
        assert read_seconds_or_off({"HPCDDP_PROGRESS": text}, "HPCDDP_PROGRESS", 30.0) == seconds


@pytest.mark.parametrize("text", ["0", "nan", "often"])
def test_an_interval_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="no number of seconds above 0"):
        read_seconds_or_off({"HPCDDP_PROGRESS": text}, "HPCDDP_PROGRESS", 30.0)
