"""metrics.jsonl: written line by line, read while it grows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.errors import RequestError
from hpcddp.runs.jsonfile import SchemaError
from hpcddp.runs.metrics import MetricLine, MetricsFile, MetricsReader, check_logged, read_latest


def step_text(step: int, **more: Any) -> bytes:
    return json.dumps({"kind": "step", "step": step, "loss": 1.5, "time": 7.0, **more}).encode() + b"\n"


def read_steps(reader: MetricsReader) -> list[int]:
    return [line.step for line in reader.read()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_what_is_written_is_read_with_speed_and_time(path: Path) -> None:
    with MetricsFile(str(path)) as file:
        file.write("step", step=1, epoch=0, lr=0.1, samples_per_s=640.5, loss=float("nan"), counted=9)
        file.log(1, {"test_acc": 0.25, "bad": float("nan")})
    step, log = MetricsReader(str(path)).read()
    numbers = {"epoch": 0, "lr": 0.1, "samples_per_s": 640.5, "loss": None, "counted": 9}
    assert step._replace(time=0.0) == MetricLine("step", 1, 0.0, numbers)
    assert log._replace(time=0.0) == MetricLine("log", 1, 0.0, {"test_acc": 0.25, "bad": None})
    assert 0 < step.time <= log.time


@pytest.mark.parametrize(("step_s", "left_s"), [(0.5, 20.0), (0.05, None)])
def test_what_is_left_is_known_by_the_pace_of_the_last_steps_unless_they_came_at_once(
    path: Path, step_s: float, left_s: float | None
) -> None:
    lines = [step_text(step, time=step * step_s) for step in range(1, 11)]
    path.write_bytes(b'{"kind": "expect", "total_steps": 50, "time": 1.0}\n' + b"".join(lines) + b'{"kind": "st')
    latest = read_latest(str(path))
    assert (latest.step, latest.total, latest.loss, latest.left_s) == (10, 50, 1.5, left_s)


def test_each_start_of_a_requeued_attempt_writes_the_schema_version_and_cuts_half_a_line(path: Path) -> None:
    for _ in range(2):
        with MetricsFile(str(path)):
            pass
        with path.open("a") as file:
            file.write('{"kind": "st')
    lines = path.read_text().split("\n")
    assert [json.loads(line)["schema"] for line in lines[:2]] == [1, 1]
    assert lines[2:] == ['{"kind": "st']


@given(st.lists(st.integers(0, 400)))
def test_no_line_is_lost_twice_or_halved_wherever_the_writer_is(tmp_path_factory: Any, cuts: list[int]) -> None:
    path = tmp_path_factory.mktemp("cuts") / "metrics.jsonl"
    whole = b"".join(step_text(step) for step in range(1, 6)) + b"\n" + step_text(6)
    reader, seen = MetricsReader(str(path)), []
    for cut in [*sorted(cuts), len(whole)]:
        path.write_bytes(whole[:cut])
        seen += read_steps(reader)
        assert len(seen) == sum(1 for line in whole[:cut].split(b"\n")[:-1] if line)
    assert seen == [1, 2, 3, 4, 5, 6]


def test_a_damaged_line_is_passed_over(path: Path) -> None:
    path.write_bytes(step_text(1) + b"\0\0\0\n" + step_text(2, loss="x") + b'{"kind": "step"}\n' + step_text(3))
    assert read_steps(MetricsReader(str(path))) == [1, 3]


def test_other_kinds_of_lines_are_passed_over_and_another_schema_is_refused(path: Path) -> None:
    path.write_bytes(b'{"kind": "weather", "time": 1.0}\n' + step_text(1) + b'{"kind": "start", "schema": 2}\n')
    lines = MetricsReader(str(path)).read()
    assert next(lines).step == 1
    with pytest.raises(SchemaError, match=r"has schema 2, .*\nhint: use the hpcddp that wrote it"):
        next(lines)


@pytest.mark.parametrize("kind", ["a folder", "a link loop"])
def test_a_file_that_cannot_be_opened_is_refused_in_two_lines(path: Path, kind: str) -> None:
    if kind == "a folder":
        path.mkdir()
    else:
        path.symlink_to(path)
    for use in (lambda: MetricsFile(str(path)), lambda: list(MetricsReader(str(path)).read())):
        with pytest.raises(RequestError, match=r"metrics\.jsonl cannot be read: .*\nhint: ls -l "):
            use()


class Tensor:
    def __init__(self, *values: float) -> None:
        self.values = values

    def __float__(self) -> float:
        if len(self.values) != 1:
            raise RuntimeError("a Tensor with 2 elements cannot be converted to Scalar")
        return self.values[0]


def test_logged_numbers_are_numbers_and_one_element_of_a_tensor() -> None:
    assert check_logged({"a": 1, "b": 2.5, "c": True, "d": Tensor(0.5)}) == {"a": 1, "b": 2.5, "c": True, "d": 0.5}


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"name": "x"}, "rt.log(name=…) was given a str that is not one number"),
        ({"loss": None}, "rt.log(loss=…) was given a NoneType that is not one number"),
        ({"loss": [1.0]}, "rt.log(loss=…) was given a list that is not one number"),
        ({"loss": Tensor(1, 2)}, "rt.log(loss=…) was given a Tensor that is not one number"),
        ({"step": 3}, "rt.log(step=…): each line has its own 'step'"),
    ],
)
def test_what_is_no_number_is_refused_in_two_lines(numbers: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_logged(numbers)
    lines = str(caught.value).splitlines()
    assert lines[0] == message
    assert len(lines) == 2
    assert lines[1].startswith("hint: ")
