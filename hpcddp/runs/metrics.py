"""`metrics.jsonl`: numbers of an attempt as JSON lines, written by rank 0."""

from __future__ import annotations

import json
import math
import os
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from types import TracebackType
from typing import Any, NamedTuple

from hpcddp.errors import RequestError
from hpcddp.record import Record
from hpcddp.runs.folder import AttemptFolder
from hpcddp.runs.jsonfile import SCHEMA, SchemaError, UnreadableFileError, check_schema

#: Names that each line of kind `log` has for itself.
RESERVED = ("kind", "step", "time")
#: The kinds of lines that are read again.
_KINDS = ("step", "at", "log", "expect", "model")
_DAMAGE = (ValueError, KeyError, TypeError, OverflowError, RecursionError)  # what a line that is none of these gives
_HEAD, _TAIL = 8192, 65536  # bytes of a file that say how far it is; a line has a few hundred
_LEAST_S = 1.0  # the first lines of a start are written together, and are no pace
_ENCODER = json.JSONEncoder(allow_nan=False)


class MetricsFile:
    """Appends one JSON object per line, each written at once; writes nothing without a path. UnreadableFileError."""

    def __init__(self, path: str | None) -> None:
        self._file = None
        if path is not None:
            try:
                os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
                _cut_half_line(path)
                self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115  # __exit__ closes it
            except OSError as error:
                raise UnreadableFileError(path, error) from error
        self.is_open = path is not None  # whether there is a file to write to
        self.write("start", schema=SCHEMA)

    def write(self, kind: str, **fields: Any) -> None:
        """`kind` says what the line is about (start, step, epoch); `time` is in seconds since 1970."""
        self.write_rows(kind, [fields])

    def write_rows(self, kind: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Several lines of one kind, at once. Null stands for NaN and infinity, which JSON does not have."""
        if self._file is not None:
            now = round(time.time(), 3)
            self._file.write("".join([f"{_encode({'kind': kind, **row, 'time': now})}\n" for row in rows]))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """A line of kind `log`: a user's own numbers, as `check_logged` gives them, after `step` steps."""
        self.write("log", step=step, **numbers)

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()


def check_logged(numbers: Mapping[str, Any]) -> dict[str, float]:
    """Convert what a user logs to Python's own numbers; a tensor of one element is one. RequestError."""
    checked: dict[str, float] = {}
    for name, value in numbers.items():
        if name in RESERVED:
            raise RequestError(
                f"rt.log({name}=…): each line has its own {name!r}", f"choose another name: rt.log(my_{name}=…)"
            )
        try:
            checked[name] = float(value.item() if hasattr(value, "item") else value)
        except (TypeError, ValueError, RuntimeError) as error:  # the last is torch's for more than one element
            kind = type(value).__name__
            raise RequestError(f"rt.log({name}=…) was given a {kind} that is not one number", "one number") from error
    return checked


def _cut_half_line(path: str) -> None:
    """Remove what a killed writer left behind the last line end."""
    if os.path.exists(path):
        with open(path, "r+b") as file:
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)


def _encode(line: Mapping[str, Any]) -> str:
    try:
        return _ENCODER.encode(line)
    except ValueError:
        is_infinite = {name: isinstance(value, float) and not math.isfinite(value) for name, value in line.items()}
        return _ENCODER.encode({name: None if is_infinite[name] else value for name, value in line.items()})


class MetricLine(NamedTuple):
    """`kind`: `step`, an optimizer step; `at`, how far a framework's loop is; `log`, a call of `rt.log`; `expect`,
    `total_steps`; `model`, `flops_per_sample`. `time`: seconds since 1970. `numbers`: all else; None: NaN or infinite.
    """

    kind: str
    step: int  # from 1, over all attempts; of `log` the last one before the call, from 0
    time: float
    numbers: dict[str, Any]

    @property
    def is_progress(self) -> bool:
        return self.kind in {"step", "at"}


def _parse(text: bytes, path: str) -> MetricLine | None:
    """Parse a line; None for another kind of line, and an empty one. One of _DAMAGE; SchemaError."""
    if not text.strip():
        return None
    line = json.loads(text.decode(errors="replace"))
    if line["kind"] == "start":
        check_schema(path, line)
    if line["kind"] not in _KINDS:
        return None
    values = ((name, value) for name, value in line.items() if name not in RESERVED)
    numbers = {name: value if value is not None and math.isfinite(value) else None for name, value in values}
    if line["kind"] == "step":
        numbers.setdefault("loss", None)
    return MetricLine(line["kind"], int(line.get("step", 0)), float(line["time"]), numbers)


class MetricsReader:
    """Reads one `metrics.jsonl` as it grows: each call gives the lines that were completed since the last one. It need
    not exist yet. Damaged lines are passed over."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._offset = 0  # in bytes; always behind a line end

    def read(self) -> Iterator[MetricLine]:
        """The new lines. SchemaError if another hpcddp wrote the file; UnreadableFileError."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                *lines, _ = file.read().split(b"\n")  # after the last line end: nothing, or half a line
        except FileNotFoundError:
            return
        except OSError as error:
            raise UnreadableFileError(self._path, error) from error
        for text in lines:
            self._offset += len(text) + 1
            with suppress(*_DAMAGE):
                if (line := _parse(text, self._path)) is not None:
                    yield line


class Latest(Record):
    """`step`: the last one. `total`: steps of the whole training. `pace_s`: seconds per step, of the last ones."""

    step: int | None = None
    total: int | None = None
    epoch: int | None = None
    loss: float | None = None
    samples_per_s: float | None = None
    pace_s: float | None = None

    @property
    def left_s(self) -> float | None:
        if self.step is None or self.total is None or self.pace_s is None:
            return None
        return max(self.total - self.step, 0) * self.pace_s


def read_latest(path: str) -> Latest:
    """Read the latest values of a `metrics.jsonl`, if it exists, by its first and last lines: a file of any size costs
    the same. A line that cannot be read is passed over."""
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD)
            file.seek(max(os.fstat(file.fileno()).st_size - _TAIL, 0))
            tail = file.read()
    except OSError:
        return Latest()
    lines: list[MetricLine] = []
    for part in (head, tail):
        recent: list[MetricLine] = []  # those of the tail at last
        for text in part.split(b"\n")[:-1]:
            with suppress(*_DAMAGE, SchemaError):
                if (line := _parse(text, path)) is not None:
                    recent.append(line)
        lines += recent
    total = next((line.numbers.get("total_steps") for line in reversed(lines) if line.kind == "expect"), None)
    recent = [line for line in recent if line.is_progress]
    if not recent:
        return Latest(total=total)
    first, last = recent[0], recent[-1]
    steps, seconds = last.step - first.step, last.time - first.time
    speeds = (line.numbers.get("samples_per_s") for line in reversed(recent))
    return Latest(
        step=last.step,
        total=total,
        epoch=last.numbers.get("epoch"),
        loss=next((line.numbers["loss"] for line in reversed(recent) if line.kind == "step"), None),
        samples_per_s=next(filter(None, speeds), None),
        pace_s=seconds / steps if steps > 0 and seconds >= _LEAST_S else None,  # of one start
    )


class LossCurve:
    """The losses of a run over all its attempts, read while it trains: a step that was made again counts as made
    last."""

    def __init__(self) -> None:
        self.steps: list[int] = []  # ascending
        self.losses: list[float] = []  # NaN where the loss was none, or infinite
        #: attempt -> the first and the last step that it has made
        self.made: dict[str, tuple[int, int]] = {}
        self._readers: dict[str, MetricsReader] = {}

    def read(self, attempts: Sequence[AttemptFolder]) -> None:
        """Read what is new in the metrics of these attempts, in the order in which they began.

        SchemaError if another hpcddp wrote one, UnreadableFileError.
        """
        for attempt in attempts:
            for line in self._readers.setdefault(attempt.name, MetricsReader(attempt.metrics)).read():
                if line.kind == "step":
                    self._add(line)
                if line.is_progress:
                    first, _ = self.made.get(attempt.name, (line.step, line.step))
                    self.made[attempt.name] = (min(first, line.step), line.step)

    def _add(self, line: MetricLine) -> None:
        while self.steps and self.steps[-1] >= line.step:
            del self.steps[-1], self.losses[-1]
        self.steps.append(line.step)
        self.losses.append(math.nan if line.numbers["loss"] is None else line.numbers["loss"])

    def sample(self, count: int) -> list[float | None]:
        """The curve as so many values at even distances: the mean loss of the steps of each. None: no finite loss."""
        if not self.steps or count < 1:
            return []
        first, span = self.steps[0], self.steps[-1] - self.steps[0] + 1
        cuts = [bisect_left(self.steps, first + span * at / count) for at in range(count + 1)]
        finite = ([loss for loss in self.losses[min(a, b - 1) : b] if loss == loss] for a, b in pairwise(cuts))
        return [sum(losses) / len(losses) if losses else None for losses in finite]
