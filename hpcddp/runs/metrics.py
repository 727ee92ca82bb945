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
        """Several lines of one kind, at once."""
        if self._file is None:
            return
        now, text = round(time.time(), 3), ""
        for row in rows:
            line = {"kind": kind, **row, "time": now}
            try:
                text += _ENCODER.encode(line) + "\n"
            except ValueError:  # JSON has no NaN and no infinity: null stands for them
                text += _ENCODER.encode({name: _null_if_infinite(value) for name, value in line.items()}) + "\n"
        self._file.write(text)

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
    """What a user logs, as Python's own numbers. RequestError names what is none, and a name that is taken.

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


def _null_if_infinite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


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


Line: TypeAlias = StepLine | AtLine | LogLine | LengthLine
_DAMAGE = (ValueError, KeyError, TypeError, OverflowError, RecursionError)  # what a line that is none of these gives


def _parse(line: dict[str, Any]) -> Line | None:
    """None for another kind of line. One of _DAMAGE."""
    kind = line["kind"]
    if kind == "expect":
        return LengthLine(int(line["total_steps"]))
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
    """None for null, and for NaN and infinity, which hpcddp writes as null."""
    return float(value) if value is not None and math.isfinite(value) else None


class MetricsReader:
    """Reads one file from its beginning. A line counts once its line end is there, so half a line is never given.

    The file need not exist yet. If it was truncated or replaced, reading starts again at its beginning.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._offset = 0  # in bytes; always behind a line end
        self._last = b""  # the line before the offset, to recognise the file by
        self._number = 0  # of the line before the offset

    def read(self) -> Iterator[Line]:
        """The new lines; other kinds of them are passed over.

        RequestError names a line that cannot be read; the next call continues after it. SchemaError if a newer
        hpcddp wrote the file.
        """
        for text in self._read_new():
            self._offset, self._last, self._number = self._offset + len(text), text, self._number + 1
            line = self._read_line(text) if text.strip() else None
            if line is not None:
                yield line

    def _read_new(self) -> list[bytes]:
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset - len(self._last))
                if file.read(len(self._last)) != self._last:
                    self._offset, self._last, self._number = 0, b"", 0
                    file.seek(0)
                *lines, _ = file.read().split(b"\n")  # after the last line end: nothing, or half a line
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UnreadableFileError(self._path, error) from error
        return [line + b"\n" for line in lines]

    def _read_line(self, text: bytes) -> Line | None:
        try:
            line = json.loads(text.decode(errors="replace"))
            if line["kind"] == "start":
                check_schema(self._path, line)
            return _parse(line)
        except _DAMAGE as error:
            cause = f"it has no {error}" if isinstance(error, KeyError) else str(error).lower()
            raise RequestError(
                f"{self._path}, line {self._number} cannot be read: {cause}",
                f"look at it: sed -n {self._number}p {self._path}",
            ) from error


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
    """Of a `metrics.jsonl`; nothing of one that is not there. A line that cannot be read is passed over."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(_HEAD)
            file.seek(max(size - _TAIL, 0))
            tail = file.read()
    except OSError:
        return Latest()
    began, recent = (list(filter(None, map(_read_leniently, text.split(b"\n")[:-1]))) for text in (head, tail))
    lines = began + recent
    totals = [line.total_steps for line in lines if isinstance(line, LengthLine)]
    steps = [line for line in lines if isinstance(line, StepLine | AtLine)]
    losses = [line.loss for line in steps if isinstance(line, StepLine)]
    speeds = [line.samples_per_s for line in steps if line.samples_per_s is not None]
    total = totals[-1] if totals else None
    if not steps:
        return Latest(total=total)
    loss, speed = (values[-1] if values else None for values in (losses, speeds))
    pace_s = _pace([line for line in recent if isinstance(line, StepLine | AtLine)])
    return Latest(steps[-1].step, total, steps[-1].epoch, loss, speed, pace_s, steps[-1].time)


def _pace(lines: list[StepLine | AtLine]) -> float | None:
    """Seconds per step between the first and the last of these lines, if they are of one start."""
    if not lines or lines[-1].step <= lines[0].step:
        return None
    seconds = lines[-1].time - lines[0].time
    return seconds / (lines[-1].step - lines[0].step) if seconds >= _LEAST_S else None


def _read_leniently(text: bytes) -> Line | None:
    with suppress(*_DAMAGE):
        return _parse(json.loads(text.decode(errors="replace")))
    return None


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
        """What is new in the metrics of these attempts, in the order in which they began.

        SchemaError if another hpcddp wrote one, UnreadableFileError. A damaged line is passed over.
        """
        newest = max((at for at, attempt in enumerate(attempts) if attempt.name in self.made), default=0)
        for attempt in attempts[newest:]:  # one that another has followed writes no more
            reader = self._readers.setdefault(attempt.name, MetricsReader(attempt.metrics))
            while not self._read_whole(reader, attempt.name):
                pass

    def _read_whole(self, reader: MetricsReader, attempt: str) -> bool:
        """Whether all was read: a damaged line ends the reading, and the next one begins behind it."""
        try:
            for line in reader.read():
                if isinstance(line, StepLine):
                    self._add(line)
                if isinstance(line, StepLine | AtLine):
                    first, _ = self.made.get(attempt, (line.step, line.step))
                    self.made[attempt] = (min(first, line.step), line.step)
        except (SchemaError, UnreadableFileError):
            raise
        except RequestError:
            return False
        return True

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
        return [_mean(self.losses[min(a, b - 1) : b]) for a, b in pairwise(cuts)]


def _mean(losses: array[float]) -> float | None:
    total = sum(losses)  # in C: a curve of a million steps is drawn every few seconds
    if not losses or math.isfinite(total):
        return total / len(losses) if losses else None
    finite = [loss for loss in losses if math.isfinite(loss)]
    return sum(finite) / len(finite) if finite else None
