"""Statuses of runs as text for people: one run as lines, several as a table; and as JSON values for programs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from hpcddp.login.run_status import RunStatus
from hpcddp.units import format_walltime

_HEADS = ("run", "state", "job", "step", "loss", "samples/s", "left", "walltime left", "")
_LONGEST = 100  # of the last column
_RIGHT = {3, 4, 5, 6, 7}


def format_statuses(runs: Sequence[RunStatus], now: float) -> str:
    """A table; of one run all that is known."""
    if len(runs) == 1 and not runs[0].is_sweep:
        return _format_one(runs[0], now)
    rows = [_HEADS, *(_row(run, now) for run in runs)]
    used = [i for i in range(len(_HEADS)) if i < 3 or any(row[i] for row in rows[1:])]
    widths = {i: max(len(row[i]) for row in rows) for i in used}
    lines = []
    for row in rows:
        cells = [f"{row[i]:>{widths[i]}}" if i in _RIGHT else f"{row[i]:{widths[i]}}" for i in used]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines) + "\n"


def status_record(run: RunStatus) -> dict[str, Any]:
    """One run as JSON values; times are seconds since 1970."""
    record = run._asdict() | {"jobs": dict(run.jobs)}
    record["links"] = {"job": run.links[0], "of": run.links[1]} if run.links[1] else None
    return record


def _row(run: RunStatus, now: float) -> tuple[str, ...]:
    said = "; ".join(filter(None, [run.point, _say_why(run, now)]))
    return (
        f"  {run.name}" if run.sweep else run.name,
        run.state,
        run.job,
        _say_step(run, "/"),
        "" if run.loss is None else f"{run.loss:.4g}",
        "" if run.samples_per_s is None else f"{run.samples_per_s:,.0f}",
        _say_left(run.left_s),
        _say_left(run.ends - now if run.ends is not None and run.state == "running" else None),
        said if len(said) <= _LONGEST else f"{said[: _LONGEST - 3]}...",
    )


def _format_one(run: RunStatus, now: float) -> str:
    rows = [
        ("job", run.job),
        ("point", run.point),
        ("step", _say_step(run, " of ") + (f", epoch {run.epoch}" if run.epoch is not None and run.step else "")),
        ("loss", "" if run.loss is None else f"{run.loss:.6g}"),
        ("best", "" if run.best is None else f"{run.best:.6g} ({run.best_mode})"),
        ("speed", "" if run.samples_per_s is None else f"{run.samples_per_s:,.0f} samples/s"),
        ("left", _say_left(run.left_s)),
        ("walltime", f"{_say_left(run.ends - now)} left" if run.ends is not None and run.state == "running" else ""),
        ("why", _say_why(run, now)),
        ("weights", run.weights_sha256 or ""),
        ("exact", _say_exact(run)),
    ]
    told = "".join(f"  {name:8}  {text}\n" for name, text in rows if text)
    return f"{run.path}: {run.state}\n{told}"


def _say_step(run: RunStatus, of: str) -> str:
    if run.step is None:
        return ""
    return f"{run.step}{of}{run.total_steps}" if run.total_steps is not None else str(run.step)


def _say_why(run: RunStatus, now: float) -> str:
    told = []
    if run.links[1]:
        told.append(f"link {run.links[0]} of at most {run.links[1]}")
    if run.state in {"queued", "held"} and run.starts is not None and run.starts > now:
        told.append(f"may start at {time.strftime('%Y-%m-%d %H:%M', time.localtime(run.starts))}")
    told.append(run.why)
    return "; ".join(filter(None, told))


def _say_left(seconds: float | None) -> str:
    return "" if seconds is None else format_walltime(max(int(seconds), 0))


def _say_exact(run: RunStatus) -> str:
    if run.exact is None:
        return ""
    deviations = run.exact.get("deviations")
    told = "; ".join(map(str, deviations)) if isinstance(deviations, list) and deviations else "no deviations"
    return f"{run.exact.get('method')}; {told}"
