"""Reads `metrics.jsonl`, also while it grows: each call gives the lines that were completed since the last one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

from hpcddp.errors import RequestError
from hpcddp.runs.jsonfile import UnreadableFileError, check_schema
from hpcddp.runs.metrics import RESERVED


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
    time: float


class LogLine(NamedTuple):
    """Numbers of one call of `rt.log`. None: it was NaN or infinite."""

    step: int  # the last one before the call, from 0
    numbers: dict[str, float | None]
    time: float


Line: TypeAlias = StepLine | AtLine | LogLine


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
        """The new lines about steps and those of `rt.log`; what other kinds there are is passed over.

        RequestError names a line that cannot be read; the next call continues after it. SchemaError if a newer
        hpcddp wrote the file.
        """
        for text in self._read_new():
            self._offset, self._last, self._number = self._offset + len(text), text, self._number + 1
            line = self._parse(text) if text.strip() else None
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

    def _parse(self, text: bytes) -> Line | None:
        try:
            line = json.loads(text.decode(errors="replace"))
            if line["kind"] == "start":
                check_schema(self._path, line)
            return _PARSERS[line["kind"]](line) if line["kind"] in _PARSERS else None
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            cause = f"it has no {error}" if isinstance(error, KeyError) else str(error).lower()
            raise RequestError(
                f"{self._path}, line {self._number} cannot be read: {cause}",
                f"look at it: sed -n {self._number}p {self._path}",
            ) from error


def _parse_step(line: dict[str, Any]) -> StepLine:
    names = ("lr", "samples_per_s", "counted")
    numbers = {name: _number(line.get(name)) for name in names}
    epoch = line.get("epoch")
    return StepLine(
        step=int(line["step"]),
        epoch=None if epoch is None else int(epoch),
        loss=_number(line["loss"]),
        time=float(line["time"]),
        **numbers,
    )


def _parse_at(line: dict[str, Any]) -> AtLine:
    epoch = line.get("epoch")
    return AtLine(int(line["step"]), None if epoch is None else int(epoch), float(line["time"]))


def _parse_log(line: dict[str, Any]) -> LogLine:
    numbers = {name: _number(value) for name, value in line.items() if name not in RESERVED}
    return LogLine(int(line["step"]), numbers, float(line["time"]))


_PARSERS: dict[str, Callable[[dict[str, Any]], Line]] = {
    "step": _parse_step,
    "at": _parse_at,
    "log": _parse_log,
}


def _number(value: Any) -> float | None:
    """None for null, and for NaN and infinity, which hpcddp writes as null."""
    return float(value) if value is not None and math.isfinite(value) else None
