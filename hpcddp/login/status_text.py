"""Statuses of runs as text for people: one run as lines, several as a table; and as JSON values for programs."""

from __future__ import annotations

import time
import unicodedata
from collections.abc import Sequence
from typing import Any

from hpcddp.login.judge import RunStatus
from hpcddp.units import format_walltime

_HEADS = ("run", "state", "job", "step", "loss", "samples/s", "left", "walltime left")
_RIGHT = {3, 4, 5, 6, 7}
#: The columns that a narrow terminal has no room for, the first one first.
_LEFT_OUT = (5, 7, 6, 2)
_LEAST = 20  # characters beside the columns, for what is said of a run; else it goes below


def format_statuses(runs: Sequence[RunStatus], now: float, width: int) -> str:
    """A table of at most `width` columns; of one run all that is known. No word is broken but one that is longer."""
    if len(runs) == 1 and not runs[0].is_sweep:
        return _format_one(runs[0], now, width)
    rows = [_HEADS, *(_row(run, now) for run in runs)]
    used = [i for i in range(len(_HEADS)) if i < 3 or any(row[i] for row in rows[1:])]
    widths = {i: max(_count(row[i]) for row in rows) for i in used}
    for i in _LEFT_OUT:
        if sum(widths.values()) + 2 * len(widths) - 2 > width and i in widths:
            del widths[i]
    lines = []
    for row, said in zip(rows, ["", *(_say(run, now) for run in runs)], strict=True):
        gaps = {i: " " * (size - _count(row[i])) for i, size in widths.items()}
        cells = [f"{gap}{row[i]}" if i in _RIGHT else f"{row[i]}{gap}" for i, gap in gaps.items()]
        lines += _join_or_wrap("  ".join(cells), said, width)
    return "\n".join(lines) + "\n"


def _join_or_wrap(cells: str, text: str, width: int) -> list[str]:
    """The text behind the cells where there is room, else below them."""
    left = width - _count(cells) - 2
    if not text or _count(text) <= left:
        return [f"{cells}  {text}".rstrip()]
    if left >= max(_LEAST, *map(_count, text.split())):
        first, *more = _wrap(text, left)
        return [f"{cells}  {first}", *(" " * (_count(cells) + 2) + line for line in more)]
    return [cells.rstrip(), *(" " * 4 + line for line in _wrap(text, width - 4))]


def _count(text: str) -> int:
    """The columns of a terminal that a text takes: two for a letter of East Asia, none for an accent."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.combining(c) > 0 for c in text)


def _wrap(text: str, width: int) -> list[str]:
    """Wrap a text to so many columns; a word is broken only if it is longer than a line."""
    lines = [""]
    for word in text.split():
        if lines[-1] and _count(lines[-1]) + 1 + _count(word) <= width:
            lines[-1] += f" {word}"
            continue
        lines += [""] if lines[-1] else []
        for c in word:
            if _count(lines[-1] + c) > max(width, 2):
                lines.append("")
            lines[-1] += c
    return lines


def status_record(run: RunStatus) -> dict[str, Any]:
    """One run as JSON values; times are seconds since 1970."""
    record = run._asdict() | {"jobs": dict(run.jobs)}
    record["links"] = {"job": run.links[0], "of": run.links[1]} if run.links[1] else None
    return record


def _row(run: RunStatus, now: float) -> tuple[str, ...]:
    return (
        f"  {run.name}" if run.sweep else run.name,
        run.state,
        run.job,
        _say_step(run, "/"),
        "" if run.loss is None else f"{run.loss:.4g}",
        "" if run.samples_per_s is None else f"{run.samples_per_s:,.0f}",
        _say_left(run.left_s),
        _say_left(run.ends - now if run.ends is not None and run.state == "running" else None),
    )


def _say(run: RunStatus, now: float) -> str:
    return "; ".join(filter(None, [run.point, _say_why(run, now)]))


def _format_one(run: RunStatus, now: float, width: int) -> str:
    rows = [
        ("job", run.job),
        ("point", run.point),
        ("step", _say_step(run, " of ") + (f", epoch {run.epoch}" if run.epoch is not None and run.step else "")),
        ("loss", "" if run.loss is None else f"{run.loss:.6g}"),
        ("best", "" if run.best is None else f"{run.best:.6g} ({run.best_mode})"),
        ("speed", "" if run.samples_per_s is None else f"{run.samples_per_s:,.0f} samples/s"),
        ("left", _say_left(run.left_s)),
        ("walltime", f"{_say_left(run.ends - now)} left" if run.ends is not None and run.state == "running" else ""),
        ("used", run.used),
        ("why", _say_why(run, now)),
        ("log", run.log),
        ("weights", run.weights_sha256 or ""),
        ("exact", _say_exact(run)),
    ]
    lines = [f"{run.path}: {run.state}"]
    for name, text in rows:
        begin = f"  {name:8}  "
        more = _wrap(text, width - len(begin)) if text else []
        lines += [f"{begin if at == 0 else ' ' * len(begin)}{line}" for at, line in enumerate(more)]
    return "\n".join(lines) + "\n"


def _say_step(run: RunStatus, of: str) -> str:
    if run.step is None:
        return ""
    return f"{run.step}{of}{run.total_steps}" if run.total_steps is not None else str(run.step)


def _say_why(run: RunStatus, now: float) -> str:
    told = []
    if run.links[1] and run.state != "finished":
        told.append(f"link {run.links[0]} of at most {run.links[1]}")
    if run.state in {"queued", "held"} and run.starts is not None and run.starts > now:
        told.append(f"may start at {time.strftime('%Y-%m-%d %H:%M', time.localtime(run.starts))}")
    told.append(run.cause or run.why)
    return "; ".join(filter(None, told))


def _say_left(seconds: float | None) -> str:
    return "" if seconds is None else format_walltime(max(int(seconds), 0))


def _say_exact(run: RunStatus) -> str:
    if run.exact is None:
        return ""
    deviations = run.exact.get("deviations")
    told = "; ".join(map(str, deviations)) if isinstance(deviations, list) and deviations else "no deviations"
    return f"{run.exact.get('method')}; {told}"
