"""Numbers of a run as JSON lines, written by rank 0."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from types import TracebackType
from typing import Any


class MetricsFile:
    """Appends one JSON object per line, each written at once; writes nothing without a path."""

    def __init__(self, path: Path | None) -> None:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            _cut_half_line(path)
        self._file = path.open("a", buffering=1) if path is not None else None  # line buffered

    def write(self, kind: str, **fields: Any) -> None:
        """`kind` says what the line is about (step, epoch, end); `time` is in seconds since 1970."""
        if self._file is not None:
            numbers = {name: _jsonable(value) for name, value in fields.items()}
            self._file.write(json.dumps({"kind": kind, **numbers, "time": round(time.time(), 3)}) + "\n")

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()


def _cut_half_line(path: Path) -> None:
    """Remove what a killed writer left behind the last line end: a requeued job has the same attempt and file."""
    if path.exists():
        with path.open("r+b") as file:
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)


def _jsonable(value: Any) -> Any:
    """JSON has no NaN and no infinity: null stands for them."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
