"""Statuses of runs as text for people: one run as lines, several as a table; and as JSON values for programs."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from typing import Any

from hpcddp.login.judge import WAITING, RunStatus
from hpcddp.units import format_duration

_HEADS = ("run", "state", "job", "step", "loss", "samples/s", "left", "walltime left")
_RIGHT = {3, 4, 5, 6, 7}
#: The columns that a narrow terminal has no room for, the first one first.
_LEFT_OUT = (5, 7, 6, 2)


def format_statuses(runs: Sequence[RunStatus], now: float, width: int) -> str:
    """A table of at most `width` columns; of one run all that is known."""
    if len(runs) == 1 and not runs[0].is_sweep:
        return _format_one(runs[0], now, width)
    rows = [_HEADS, *(_row(run, now) for run in runs)]
    used = [i for i in range(len(_HEADS)) if i < 3 or any(row[i] for row in rows[1:])]
    widths = {i: max(len(row[i]) for row in rows) for i in used}
    for i in _LEFT_OUT:
        if sum(widths.values()) + 2 * len(widths) - 2 > width and i in widths:
            del widths[i]
    lines = []
    for row, text in zip(rows, ["", *(_describe(run, now) for run in runs)], strict=True):
        cells = "  ".join(f"{row[i]:>{size}}" if i in _RIGHT else f"{row[i]:{size}}" for i, size in widths.items())
        if len(cells) + 2 + len(text) <= width:
            lines.append(f"{cells}  {text}".rstrip())
        else:
            lines += [cells.rstrip(), *_wrap(text, width, " " * 4, " " * 4)]
    return "\n".join(lines) + "\n"


def _wrap(text: str, width: int, first: str, others: str) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=others, break_on_hyphens=False)


def status_record(run: RunStatus) -> dict[str, Any]:
    record = run._asdict() | {"jobs": dict(run.jobs)}
    record["links"] = {"job": run.links[0], "of": run.links[1]} if run.links[1] else None
    return record


def _row(run: RunStatus, now: float) -> tuple[str, ...]:
    return (
        f"  {run.name}" if run.sweep else run.name,
        run.state,
        run.job,
        _format_step(run, "/"),
        "" if run.loss is None else f"{run.loss:.4g}",
        "" if run.samples_per_s is None else f"{run.samples_per_s:,.0f}",
        _format_left(run.left_s),
        _format_left(run.ends - now if run.ends is not None and run.state == "running" else None),
    )


def _describe(run: RunStatus, now: float) -> str:
    return "; ".join(filter(None, [run.point, _format_why(run, now)]))


def _format_one(run: RunStatus, now: float, width: int) -> str:
    rows = [
        ("job", run.job),
        ("point", run.point),
        ("step", _format_step(run, " of ") + (f", epoch {run.epoch}" if run.epoch is not None and run.step else "")),
        ("loss", "" if run.loss is None else f"{run.loss:.6g}"),
        ("best", "" if run.best is None else f"{run.best:.6g} ({run.best_mode})"),
        ("speed", "" if run.samples_per_s is None else f"{run.samples_per_s:,.0f} samples/s"),
        ("left", _format_left(run.left_s)),
        ("walltime", f"{_format_left(run.ends - now)} left" if run.ends is not None and run.state == "running" else ""),
        ("used", run.used),
        ("why", _format_why(run, now)),
        ("log", run.log),
        ("weights", run.weights_sha256 or ""),
        ("exact", _format_exact(run)),
    ]
    lines = [f"{run.path}: {run.state}"]
    for name, text in rows:
        begin = f"  {name:8}  "
        lines += _wrap(text, width, begin, " " * len(begin))
    return "\n".join(lines) + "\n"


def _format_step(run: RunStatus, of: str) -> str:
    if run.step is None:
        return ""
    return f"{run.step}{of}{run.total_steps}" if run.total_steps is not None else str(run.step)


def _format_why(run: RunStatus, now: float) -> str:
    parts = []
    if run.links[1] and run.state != "finished":
        parts.append(f"link {run.links[0]} of at most {run.links[1]}")
    if run.state in WAITING and run.starts is not None and run.starts > now:
        parts.append(f"may start at {time.strftime('%Y-%m-%d %H:%M', time.localtime(run.starts))}")
    parts.append(run.cause or run.why)
    return "; ".join(filter(None, parts))


def _format_left(seconds: float | None) -> str:
    return "" if seconds is None else format_duration(seconds)


def _format_exact(run: RunStatus) -> str:
    if run.exact is None:
        return ""
    deviations = run.exact.get("deviations")
    texts = deviations if isinstance(deviations, list) and deviations else ["no deviations"]
    return "; ".join(map(str, (run.exact.get("method"), *texts)))
