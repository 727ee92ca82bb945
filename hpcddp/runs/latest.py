"""How far an attempt is, by the first and the last lines of its metrics: a file of any size costs the same."""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from typing import Any

from hpcddp.record import Record

_HEAD, _TAIL = 8192, 65536  # bytes; a line has a few hundred
_LEAST_S = 1.0  # the first lines of a start are written together, and are no pace


class Latest(Record):
    """`step`: the last one; None: none is recorded. `total`: steps of the whole training, where its length is known.
    `pace_s`: seconds per step, of the last ones. `time`: of the last line, in seconds since 1970."""

    step: int | None = None
    total: int | None = None
    epoch: int | None = None
    loss: float | None = None
    samples_per_s: float | None = None
    pace_s: float | None = None
    time: float | None = None

    @property
    def left_s(self) -> float | None:
        """Seconds to the end of the training at this pace."""
        if self.step is None or self.total is None or self.pace_s is None:
            return None
        return max(self.total - self.step, 0) * self.pace_s


def read_latest(path: str) -> Latest:
    """Of a `metrics.jsonl`; nothing of one that is not there. A line that cannot be read is passed over."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(_HEAD)
            file.seek(max(size - _TAIL, 0))
            tail = file.read()
    except OSError:
        return Latest()
    lines = [line for text in (head, tail) for line in text.split(b"\n")[:-1]]
    told = [line for line in map(_read, lines) if line is not None]
    totals = [line["total_steps"] for line in told if line.get("kind") == "expect"]
    steps = [line for line in told if _is_step(line)]
    total = totals[-1] if totals and type(totals[-1]) is int else None
    if not steps:
        return Latest(total=total)
    last = steps[-1]
    recent = [line for line in map(_read, tail.split(b"\n")[:-1]) if line and _is_step(line)]
    speeds = (_number(line.get("samples_per_s")) for line in reversed(steps))
    losses = (line.get("loss") for line in reversed(steps) if line.get("kind") == "step")
    return Latest(
        last["step"],
        total,
        last["epoch"] if type(last.get("epoch")) is int else None,
        _number(next(losses, None)),
        next((speed for speed in speeds if speed is not None), None),
        _pace(recent),
        _number(last.get("time")),
    )


def _is_step(line: dict[str, Any]) -> bool:
    """Whether it is about a step, as `AtLine` and `StepLine` are."""
    return line.get("kind") in {"step", "at"} and type(line.get("step")) is int


def _pace(lines: list[dict[str, Any]]) -> float | None:
    """Seconds per step between the first and the last of these lines, if they are of one start."""
    told = [(line.get("step"), _number(line.get("time"))) for line in lines]
    made = [(step, time) for step, time in told if type(step) is int and time is not None]
    if len(made) < 2:
        return None
    (first, began), (last, ended) = made[0], made[-1]
    return (ended - began) / (last - first) if last > first and ended - began >= _LEAST_S else None


def _read(line: bytes) -> dict[str, Any] | None:
    with suppress(ValueError, RecursionError):
        content = json.loads(line.decode(errors="replace"))
        return content if isinstance(content, dict) else None
    return None


def _number(value: object) -> float | None:
    return float(value) if type(value) in {int, float} and math.isfinite(value) else None  # type: ignore[arg-type]  # it is checked
