"""The progress of a training: a bar on a terminal, a line per interval in a job's log. The numbers as text, and when.

Rank 0 prints it, on stderr. A step that prints nothing costs two additions and one look at the clock.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple, TextIO

from hpcddp.errors import RequestError

DEFAULT_INTERVAL_S = 30.0
_REDRAW_S = 0.2  # of the bar
_BAR_WIDTH = 20
_MARKS = 50  # of the bar: its samples/s are those of the last 10 seconds; a line's are those of its interval
_MOST_S = 100 * 86400


class Standing(NamedTuple):
    """How far a training is. None: not known, and not shown."""

    step: int  # steps since the start of the run
    total_steps: int | None = None
    loss: float | None = None
    samples_per_s: float | None = None
    left_s: float | None = None  # until the last step, at the pace of this attempt
    save_at: int | None = None  # the step after which the next checkpoint is written
    walltime_left_s: float | None = None


def format_line(standing: Standing) -> str:
    """`step 1200/5000  loss 0.3123  5,210 samples/s  0:12:30 left  save at 1300  walltime left 1:02:03`."""
    s = standing
    parts = [f"step {s.step}" + (f"/{s.total_steps}" if s.total_steps is not None else "")]
    if s.loss is not None:
        parts.append(f"loss {s.loss:.4g}")
    if s.samples_per_s is not None and math.isfinite(s.samples_per_s):
        parts.append(f"{_format_rate(s.samples_per_s)} samples/s")
    if s.left_s is not None:
        parts.append(f"{format_seconds(s.left_s)} left")
    if s.save_at is not None:
        parts.append(f"save at {s.save_at}")
    if s.walltime_left_s is not None:
        parts.append(f"walltime left {format_seconds(s.walltime_left_s)}")
    return "  ".join(parts)


def format_bar(standing: Standing, columns: int) -> str:
    """The same behind a bar, if the last step is known; at most `columns` characters, so that it stays on one line."""
    total = standing.total_steps
    text = format_line(standing)
    if total:
        filled = _BAR_WIDTH * min(max(standing.step, 0), total) // total
        text = f"[{'#' * filled:<{_BAR_WIDTH}}] {text}"
    return text[: max(columns, 0)]


def format_seconds(seconds: float) -> str:
    """`H:MM:SS`, with days in front from one day on: `2d 03:04:05`. Below zero, NaN and beyond 100 days are marked."""
    if math.isnan(seconds):
        return "?"
    if seconds >= _MOST_S:
        return "over 100 days"
    whole = max(0, int(seconds))
    days, rest = divmod(whole, 86400)
    clock = f"{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days}d {rest // 3600:02d}:{clock}" if days else f"{rest // 3600}:{clock}"


def _format_rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 10 else f"{per_s:.2g}"


def read_seconds_or_off(env: Mapping[str, str], name: str, default_s: float) -> float | None:
    """The variable `name`: seconds, or `off`; None for `off`. RequestError for another text."""
    text = env.get(name, "").strip()
    if not text:
        return default_s
    if text == "off":
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise RequestError(
            f"{name} is {text!r}, which is no number of seconds above 0", f"{name}={default_s:.0f}, or off"
        )
    return seconds


class Progress:
    """Prints how far a training is to `out`; nothing if `out` is None, as on every rank but the first.

    `interval_s` is the time between two lines where `out` is no terminal; None prints nothing there and draws no bar.
    `deadline` says when the job ends, in seconds since 1970: that may move. `clock` is in seconds, from anywhere.
    """

    def __init__(
        self,
        out: TextIO | None,
        *,
        interval_s: float | None = DEFAULT_INTERVAL_S,
        total_steps: int | None = None,
        save_every: int | None = None,
        deadline: Callable[[], float | None] = lambda: None,
        columns: Callable[[], int] = lambda: 80,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.total_steps = total_steps  # may become known later
        self._out = out if interval_s is not None else None
        self._is_terminal = self._out is not None and self._out.isatty()
        self._interval_s = _REDRAW_S if self._is_terminal else interval_s or DEFAULT_INTERVAL_S
        self._save_every = save_every
        self._deadline = deadline
        self._columns = columns
        self._clock = clock
        self._now = now
        self._samples = 0
        self._next = -math.inf if self._out is not None else math.inf  # when to print; the first step sets it
        self._marks: deque[tuple[float, int, int]] = deque(maxlen=_MARKS if self._is_terminal else 1)
        self._first: tuple[float, int] | None = None  # time and number of the first step of this attempt
        self._is_drawn = False

    def step(self, step: int, samples: int, loss: float | None = None) -> None:
        """Step number `step` (from 1, over all attempts) was made, of `samples` samples over all ranks."""
        self._samples += samples
        at = self._clock()
        if at >= self._next:
            self._show(at, step, loss)

    def clear(self) -> None:
        """Leave the bar's line empty for what is printed next. A line in a log stays."""
        if self._is_drawn and self._out is not None:
            self._write("\r\x1b[K")
            self._is_drawn = False

    def _show(self, at: float, step: int, loss: float | None) -> None:
        self._next = at + self._interval_s
        if self._first is None:  # the first step compiles and fills caches: it starts the clock and is not counted
            self._first = (at, step)
            self._marks.append((at, step, self._samples))
            return
        standing = self._standing(at, step, loss)
        self._marks.append((at, step, self._samples))
        if self._is_terminal:
            self._write("\r" + format_bar(standing, self._columns() - 1) + "\x1b[K")
            self._is_drawn = True
        else:
            self._write(f"hpcddp: {format_line(standing)}\n")

    def _standing(self, at: float, step: int, loss: float | None) -> Standing:
        began, _, before = self._marks[0]
        left_s = None
        if self.total_steps is not None and self._first is not None and step > self._first[1]:
            pace_s = (at - self._first[0]) / (step - self._first[1])
            left_s = max(0, self.total_steps - step) * pace_s
        every, ends = self._save_every, self._deadline()
        return Standing(
            step,
            self.total_steps,
            loss,
            (self._samples - before) / (at - began) if at > began else None,
            left_s,
            step - step % every + every if every else None,
            ends - self._now() if ends is not None else None,
        )

    def _write(self, text: str) -> None:
        """Nobody to read it is no reason to end a training."""
        if self._out is None:
            return
        try:
            self._out.write(text)
            self._out.flush()
        except (OSError, ValueError):  # ValueError: the stream is closed
            self._out, self._next = None, math.inf
