"""Draws what `hpcddp watch` shows of a run at this moment: python docs/make_screen.py RUN > docs/watch.svg."""

from __future__ import annotations

import io
import os
import re
import sys
from html import escape

from rich.console import Console
from rich.segment import Segment

from hpcddp.cli.watch_screen import Screen
from hpcddp.login.find_run import find_run
from hpcddp.login.watched import Watcher

WIDTH, HEIGHT = 84, 23  # characters
ACROSS, DOWN, MARGIN = 10, 21, 12  # pixels of a character, and beside the text
# On a light page, and on a dark one.
COLOURS = {
    "text": ("#24292f", "#e6edf3"),
    "dim": ("#57606a", "#9da7b1"),
    "green": ("#116329", "#7ee787"),
    "yellow": ("#7d4e00", "#e3b341"),
    "red": ("#a40e26", "#ff7b72"),
    "cyan": ("#0550ae", "#79c0ff"),
}
BACK = ("#f6f8fa", "#161b22")


def draw(lines: list[list[Segment]]) -> str:
    """The picture: one `text` for each piece of a line, as wide as its characters."""
    width, height = WIDTH * ACROSS + 2 * MARGIN, len(lines) * DOWN + 2 * MARGIN
    parts = [
        f'<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img" aria-label="hpcddp watch">',
        "  <style>",
        '    text { font: 16px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace }',
        "    .bold { font-weight: bold }",
        *_rules(0, "    "),
        "    @media (prefers-color-scheme: dark) {",
        *_rules(1, "      "),
        "    }",
        "  </style>",
        f'  <rect class="back" width="{width}" height="{height}" rx="8"/>',
    ]
    for row, line in enumerate(lines):
        column = 0
        for text, style, _ in line:
            colour = style.color.name if style and style.color else "dim" if style and style.dim else "text"
            names = f"{colour} bold" if style and style.bold else colour
            for words in re.finditer(r"\S+(?: \S+)*", text):
                at = f'x="{MARGIN + (column + words.start()) * ACROSS}" y="{MARGIN + row * DOWN + 16}"'
                length = f'textLength="{len(words[0]) * ACROSS}" lengthAdjust="spacingAndGlyphs"'
                parts.append(f'  <text class="{names}" {at} {length}>{escape(words[0], quote=False)}</text>')
            column += len(text)
    return "\n".join([*parts, "</svg>", ""])


def _rules(which: int, indent: str) -> list[str]:
    rules = [f"{indent}.{name} {{ fill: {colours[which]} }}" for name, colours in COLOURS.items()]
    return [f"{indent}.back {{ fill: {BACK[which]} }}", *rules]


def main() -> None:
    watcher = Watcher(find_run(sys.argv[1]), os.environ)  # noqa: TID251  # this is an edge
    screen = Screen(watcher.poll(), watcher.curve)
    console = Console(file=io.StringIO(), width=WIDTH, height=HEIGHT, force_terminal=True)
    options = console.options.update(width=WIDTH, height=HEIGHT)
    sys.stdout.write(draw(console.render_lines(screen, options)))


if __name__ == "__main__":
    main()
