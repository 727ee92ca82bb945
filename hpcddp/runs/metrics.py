"""`metrics.jsonl`: numbers of an attempt as JSON lines, written by rank 0."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any

from hpcddp.errors import RequestError
from hpcddp.runs.jsonfile import SCHEMA, DamagedFileError, UnreadableFileError, check_schema

#: Names that each line of kind `log` has for itself.
RESERVED = ("kind", "step", "time")


class MetricsFile:
    """Appends one JSON object per line, each written at once; writes nothing without a path.

    The first line of each start has kind `start` and the file's schema version. The errors of `check_metrics`, before
    anything is written.
    """

    def __init__(self, path: str | None) -> None:
        self._file = None
        if path is not None:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            check_metrics(path)
            _cut_half_line(path)
            self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115  # __exit__ closes it
        self.write("start", schema=SCHEMA)

    def write(self, kind: str, **fields: Any) -> None:
        """`kind` says what the line is about (start, step, epoch); `time` is in seconds since 1970."""
        if self._file is not None:
            numbers = {name: _jsonable(value) for name, value in fields.items()}
            self._file.write(json.dumps({"kind": kind, **numbers, "time": round(time.time(), 3)}) + "\n")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """A line of kind `log`: a user's own numbers, as `check_numbers` gives them, after `step` steps."""
        self.write("log", step=step, **numbers)

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()


def check_numbers(numbers: Mapping[str, Any]) -> dict[str, float]:
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


def check_metrics(path: str) -> None:
    """SchemaError if another hpcddp wrote to the file; UnreadableFileError. Damaged lines are passed over."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            starts = [line for line in file if '"start"' in line]  # a user's own numbers may have that name, too
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise UnreadableFileError(path, error) from error
    for line in starts:
        with suppress(DamagedFileError, ValueError, RecursionError):
            content = json.loads(line)
            if isinstance(content, dict) and content.get("kind") == "start":
                check_schema(path, content)


def _cut_half_line(path: str) -> None:
    """Remove what a killed writer left behind the last line end: a requeued job has the same attempt and file."""
    if os.path.exists(path):
        with open(path, "r+b") as file:
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)


def _jsonable(value: Any) -> Any:
    """JSON has no NaN and no infinity: null stands for them."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
