"""A run's numbers as a table: a list of rows, which `pandas.DataFrame` takes as it is."""

from __future__ import annotations

import os
from typing import Any

from hpcddp.errors import RequestError, nearest
from hpcddp.runs.record import RunRecord, read_run

KINDS = ("step", "log")


def read_table(run: str, kind: str = "step") -> list[dict[str, Any]]:
    """One row for each step or call of `rt.log` of a run, over all its attempts, in order.

    A step that was made again counts as it was made last. See `read_run` for errors; RequestError for another kind.
    """
    if kind not in KINDS:
        raise RequestError(f"kind {kind!r} is unknown{nearest(str(kind), list(KINDS))}", f"one of {', '.join(KINDS)}")
    if not isinstance(run, (str, os.PathLike)):
        raise RequestError(f"run {run!r} is not the path of a run folder", 'hpcddp.load("runs/train")')
    return _rows(read_run(run), kind)


def _rows(record: RunRecord, kind: str) -> list[dict[str, Any]]:
    if kind == "log":
        return [{"step": line.step, **line.numbers, "time": line.time} for line in record.logs]
    return [line._asdict() | {"attempt": record.attempts[step]} for step, line in record.steps.items()]
