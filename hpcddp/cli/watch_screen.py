"""The screen of `hpcddp watch`: what a look at a run has found, as lines that fit into a terminal of any size."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from hpcddp.login.watched import Look
from hpcddp.runs.metrics import LossCurve
from hpcddp.units import format_duration, printable

_BRAILLE = 0x2800  # the character without dots
# The bit of each dot of a braille character: by its row from above, by its column.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_COLOURS = {
    "running": "green",
    "finished": "green",
    "failed": "red",
    "unfinished": "yellow",
    "queued": "cyan",
    "held": "red",
}
_LEAST_CURVE = 5  # lines, with the title and the steps
_LOG_LINES, _ATTEMPTS = 8, 5
_SCALE = 10  # characters beside the curve, for its values


def draw_curve(values: Sequence[float | None], width: int, height: int) -> list[str]:
    """The curve as `height` lines of at most `width` braille characters, each of two values; the largest is at the top,
    None is a gap. One value at least is no gap."""
    known = [value for value in values if value is not None]
    low, high = min(known), max(known)
    cells = [[0] * width for _ in range(height)]
    before: int | None = None
    for column, value in enumerate(values[: 2 * width]):
        if value is None:
            before = None
            continue
        above = (high - value) / (high - low) if high > low else 0.5
        row = round(above * (4 * height - 1))
        for y in _join_rows(before, row):
            cells[y // 4][column // 2] |= _DOTS[y % 4][column % 2]
        before = row
    return ["".join(chr(_BRAILLE + bits) if bits else " " for bits in line).rstrip() for line in cells]


def _join_rows(before: int | None, row: int) -> range:
    """The rows that join this value to the one before it, so that a steep curve has no holes."""
    if before is None or abs(before - row) < 2:
        return range(row, row + 1)
    return range(before + 1, row + 1) if before < row else range(row, before)


class Screen:
    def __init__(self, look: Look, curve: LossCurve) -> None:
        self._look, self._curve = look, curve

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, options.height or options.size.height
        lines = [*self._head(), *self._dates()]
        clock = time.strftime("%H:%M:%S", time.localtime(self._look.time))
        foot = Text(f"{clock}  Ctrl-C ends this, not the job", "dim")
        log = [Text("log", "bold"), *(Text(f"  {printable(line)}") for line in self._look.log[-_LOG_LINES:])]
        attempts = self._attempts()
        space = height - len(lines) - len(attempts) - len(log) - 1
        lines += [*self._draw(width, max(space, _LEAST_CURVE)), *attempts, *log]
        blank = [Text("")] * height
        drawn = [*(lines + blank)[: height - 1], foot]
        for line in drawn:
            line.truncate(width, overflow="ellipsis")
            line.end = "\n" if line is not foot else ""  # a line end behind the last one would scroll
            yield line

    def _head(self) -> list[Text]:
        run, problem = self._look.status, self._look.problem
        colour = _COLOURS.get(run.state, "")
        title = Text.assemble(
            (printable(run.name), "bold"), "  ", (run.state, colour), f"  {printable(run.why)}".rstrip()
        )
        of = f" of {run.total_steps}" if run.total_steps is not None else ""
        parts = [
            f"step {run.step}{of}" if run.step is not None else "no step yet",
            f"epoch {run.epoch}" if run.epoch is not None else "",
            f"loss {run.loss:.6g}" if run.loss is not None else "",
            f"{run.samples_per_s:,.0f} samples/s" if run.samples_per_s is not None else "",
            f"{format_duration(run.left_s)} left" if run.left_s is not None and run.state == "running" else "",
        ]
        lines = [title, Text("  ".join(filter(None, parts)))]
        return [*lines, Text(printable(problem), "red")] if problem else lines

    def _dates(self) -> list[Text]:
        look, end = self._look, self._look.end
        saved = f"step {look.saved[0]}, {format_duration(look.saved[1])} ago" if look.saved is not None else "none yet"
        lines = [_row("checkpoint", saved)]
        if look.status.state != "running":
            return lines
        if end is None or end.ends is None:
            return [*lines, _row("job ends", "not known")]
        when = f"in {format_duration(end.ends - look.time)}, {_clock(end.ends)} ({printable(end.source)})"
        warns = f"; the ranks are warned at {_clock(end.warns)}" if end.warns is not None else ""
        return [*lines, _row("job ends", f"{when}{warns}")]

    def _draw(self, width: int, height: int) -> list[Text]:
        """The curve with its title above it, and its steps below it."""
        inner, across = height - 2, width - _SCALE - 1
        values = self._curve.sample(2 * max(across, 1))
        if not any(value is not None for value in values):
            return [Text("loss  no step with a loss is recorded", "dim")]
        rows = draw_curve(values, max(across, 1), inner)
        known = [value for value in values if value is not None]
        scale = [f"{max(known):.4g}", *[""] * (inner - 2), f"{min(known):.4g}"]
        steps = self._curve.steps
        last = str(steps[-1])
        below = f"step {steps[0]}".ljust(max(across - len(last), 0)) + last if steps[-1] > steps[0] else f"step {last}"
        drawn = [
            Text.assemble((f"{value:>{_SCALE}} ", "dim"), (row, "cyan")) for value, row in zip(scale, rows, strict=True)
        ]
        return [Text("loss", "bold"), *drawn, Text(f"{'':{_SCALE}} {below}", "dim")]

    def _attempts(self) -> list[Text]:
        """The title and the newest rows; the title says how many are left out."""
        rows = []
        for one in self._look.attempts[-_ATTEMPTS:]:
            steps = f"steps {one.steps[0]} to {one.steps[1]}" if one.steps else "no step"
            rows.append(Text(f"  {printable(one.name)}  {steps}  {printable(one.end)}".rstrip()))
        left_out = len(self._look.attempts) - len(rows)
        more = f"  {left_out} more" if left_out else ""
        return [Text.assemble(("attempts", "bold"), (more, "dim")), *rows]


def _row(name: str, text: str) -> Text:
    return Text.assemble((f"{name:{_SCALE}} ", "bold"), text)


def _clock(at: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
