"""`metrics.jsonl`: numbers of an attempt as JSON lines, written by rank 0."""

from __future__ import annotations

import json
import math
import os
import time
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias

from hpcddp.errors import RequestError
from hpcddp.record import Record
from hpcddp.runs.folder import AttemptFolder
from hpcddp.runs.jsonfile import SCHEMA, SchemaError, UnreadableFileError, check_schema

#: Names that each line of kind `log` has for itself.
RESERVED = ("kind", "step", "time")


class MetricsFile:
    """Appends one JSON object per line, each written at once; writes nothing without a path.

    The first line of each start has kind `start` and the file's schema version. UnreadableFileError.
    """

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
            lines = ({"kind": kind, **row, "time": now} for row in rows)
            self._file.write("".join(f"{_encode(line)}\n" for line in lines))

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
    """Convert what a user logs to Python's own numbers. RequestError names what is none, and a name that is taken.

    A tensor or an array of one element is a number, too; reading a tensor waits for its device.
    """
    checked: dict[str, float] = {}
    for name, value in numbers.items():
        if name in RESERVED:
            raise RequestError(
                f"rt.log({name}=…): each line has its own {name!r}", f"choose another name: rt.log(my_{name}=…)"
            )
        try:
            number = value.item() if hasattr(value, "item") else value
        except (ValueError, RuntimeError):  # numpy's and torch's word for more than one element
            number = None
        if not isinstance(number, int | float):
            kind = type(value).__name__
            raise RequestError(
                f"rt.log({name}=…) was given a {kind} that is not one number", f"rt.log({name}=float(…)), or one number"
            )
        checked[name] = number
    return checked


def _cut_half_line(path: str) -> None:
    """Remove what a killed writer left behind the last line end: a requeued job has the same attempt and file."""
    if os.path.exists(path):
        with open(path, "r+b") as file:
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)


_ENCODER = json.JSONEncoder(allow_nan=False)


def _encode(line: Mapping[str, Any]) -> str:
    try:
        return _ENCODER.encode(line)
    except ValueError:
        is_infinite = {name: isinstance(value, float) and not math.isfinite(value) for name, value in line.items()}
        return _ENCODER.encode({name: None if is_infinite[name] else value for name, value in line.items()})


# Reads `metrics.jsonl`, also while it grows: each call gives the lines that were completed since the last one.


class StepLine(NamedTuple):
    """One optimizer step. `time` is in seconds since 1970; a number that is None was NaN, infinite or not recorded."""

    step: int  # from 1, over all attempts
    epoch: int | None
    loss: float | None  # of the global batch
    lr: float | None
    samples_per_s: float | None
    time: float
    counted: float | None = None  # what the mean loss is a mean over, if not samples


class AtLine(NamedTuple):
    """How far a framework's own loop is, whose loss is known of some steps alone."""

    step: int  # from 1, over all attempts
    epoch: int | None
    samples_per_s: float | None
    time: float


class LogLine(NamedTuple):
    """Numbers of one call of `rt.log`. None: it was NaN or infinite."""

    step: int  # the last one before the call, from 0
    numbers: dict[str, float | None]
    time: float


class LengthLine(NamedTuple):
    """How many steps the whole training has."""

    total_steps: int


class ModelLine(NamedTuple):
    """The cost of a sample, as the model, or one of several, says."""

    flops_per_sample: float


MetricLine: TypeAlias = StepLine | AtLine | LogLine | LengthLine | ModelLine
_DAMAGE = (ValueError, KeyError, TypeError, OverflowError, RecursionError)  # what a line that is none of these gives


def _parse(text: bytes, path: str) -> MetricLine | None:
    """Parse a line; None for another kind of line, and an empty one. One of _DAMAGE; SchemaError."""
    if not text.strip():
        return None
    line = json.loads(text.decode(errors="replace"))
    kind = line["kind"]
    if kind == "start":
        check_schema(path, line)
    if kind == "expect":
        return LengthLine(int(line["total_steps"]))
    if kind == "model":
        return ModelLine(float(line["flops_per_sample"]))
    if kind == "log":
        numbers = {name: _number(value) for name, value in line.items() if name not in RESERVED}
        return LogLine(int(line["step"]), numbers, float(line["time"]))
    if kind not in {"step", "at"}:
        return None
    step, time, epoch = int(line["step"]), float(line["time"]), line.get("epoch")
    epoch = None if epoch is None else int(epoch)
    lr, speed, counted = (_number(line.get(name)) for name in ("lr", "samples_per_s", "counted"))
    if kind == "at":
        return AtLine(step, epoch, speed, time)
    return StepLine(step, epoch, _number(line["loss"]), lr, speed, time, counted)


def _number(value: Any) -> float | None:
    """Read a number; None for null, which hpcddp writes for NaN and infinity."""
    return float(value) if value is not None and math.isfinite(value) else None


class MetricsReader:
    """Reads one file from its beginning. A line counts once its line end is there, so half a line is never given.

    The file need not exist yet. A damaged line is passed over, or `is_strict`: an error.
    """

    def __init__(self, path: str, *, is_strict: bool = False) -> None:
        self._path, self._is_strict = path, is_strict
        self._offset = 0  # in bytes; always behind a line end
        self._number = 0  # of the line before the offset

    def read(self) -> Iterator[MetricLine]:
        """The new lines; other kinds of them are passed over.

        RequestError names a line that cannot be read. SchemaError if another hpcddp wrote the file;
        UnreadableFileError.
        """
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                *lines, _ = file.read().split(b"\n")  # after the last line end: nothing, or half a line
        except FileNotFoundError:
            return
        except OSError as error:
            raise UnreadableFileError(self._path, error) from error
        for text in lines:
            self._offset, self._number = self._offset + len(text) + 1, self._number + 1
            try:
                line = _parse(text, self._path)
            except _DAMAGE as error:
                if not self._is_strict:
                    continue
                cause = f"it has no {error}" if isinstance(error, KeyError) else str(error).lower()
                raise RequestError(
                    f"{self._path}, line {self._number} cannot be read: {cause}",
                    f"look at it: sed -n {self._number}p {self._path}",
                ) from error
            if line is not None:
                yield line


# How far an attempt is, by the first and the last lines of its metrics: a file of any size costs the same.


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
    """Read the latest values of a `metrics.jsonl`, if it exists. A line that cannot be read is passed over."""
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD)
            file.seek(max(os.fstat(file.fileno()).st_size - _TAIL, 0))
            tail = file.read()
    except OSError:
        return Latest()
    lines: list[MetricLine] = []
    recent: list[StepLine | AtLine] = []
    for text, is_recent in ((head, False), (tail, True)):
        for one in text.split(b"\n")[:-1]:
            with suppress(*_DAMAGE, SchemaError):
                line = _parse(one, path)
                lines += [line] if line is not None else []
                recent += [line] if is_recent and isinstance(line, StepLine | AtLine) else []
    latest = Latest(total=next((line.total_steps for line in reversed(lines) if isinstance(line, LengthLine)), None))
    if not recent:
        return latest
    first, last = recent[0], recent[-1]
    steps, seconds = last.step - first.step, last.time - first.time
    return latest._replace(
        step=last.step,
        epoch=last.epoch,
        loss=next((line.loss for line in reversed(recent) if isinstance(line, StepLine)), None),
        samples_per_s=next((line.samples_per_s for line in reversed(recent) if line.samples_per_s is not None), None),
        pace_s=seconds / steps if steps > 0 and seconds >= _LEAST_S else None,  # of one start
        time=last.time,
    )


# The losses of a run over all its attempts, read while it trains: a step that was made again counts as made last.


class LossCurve:
    """Sixteen bytes a step, however long the run is. Each file is read once."""

    def __init__(self) -> None:
        self.steps = array("q")  # ascending
        self.losses = array("d")  # NaN where the loss was none, or infinite
        #: attempt -> the first and the last step that it has made
        self.made: dict[str, tuple[int, int]] = {}
        self._readers: dict[str, MetricsReader] = {}

    def read(self, attempts: Sequence[AttemptFolder]) -> None:
        """Read what is new in the metrics of these attempts, in the order in which they began.

        SchemaError if another hpcddp wrote one, UnreadableFileError.
        """
        newest = max((at for at, attempt in enumerate(attempts) if attempt.name in self.made), default=0)
        for attempt in attempts[newest:]:  # one that another has followed writes no more
            for line in self._readers.setdefault(attempt.name, MetricsReader(attempt.metrics)).read():
                if isinstance(line, StepLine):
                    self._add(line)
                if isinstance(line, StepLine | AtLine):
                    first, _ = self.made.get(attempt.name, (line.step, line.step))
                    self.made[attempt.name] = (min(first, line.step), line.step)

    def _add(self, line: StepLine) -> None:
        at = bisect_left(self.steps, line.step) if self.steps and self.steps[-1] >= line.step else len(self.steps)
        del self.steps[at:], self.losses[at:]
        self.steps.append(line.step)
        self.losses.append(math.nan if line.loss is None else line.loss)

    def sample(self, count: int) -> list[float | None]:
        """The curve as so many values at even distances of steps: the mean loss of the steps of each, or of the step
        before where there is none. None: no finite loss."""
        if not self.steps or count < 1:
            return []
        first, span = self.steps[0], self.steps[-1] - self.steps[0] + 1
        cuts = [bisect_left(self.steps, first + span * at / count) for at in range(count + 1)]
        finite = ([loss for loss in self.losses[min(a, b - 1) : b] if loss == loss] for a, b in pairwise(cuts))
        return [sum(losses) / len(losses) if losses else None for losses in finite]
