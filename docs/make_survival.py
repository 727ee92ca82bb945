"""Draws docs/survival.svg from docs/survival.json, the times of a real job (benchmarks/survival/record.py)."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
NODES = ("node1", "node2", "node3", "node4")
LOST = "node3"
LEFT, WIDTH, TOP, ROW, BAR = 80, 740, 52, 40, 26
TRAINING, FAULT, EVENT, TEXT = "#9ecae1", "#a50f15", "#555555", "#333333"


def draw(told: dict[str, Any]) -> str:
    """The picture. `told`: seconds since the first step."""
    (first, second), fault = told["attempts"], told["fault"]
    scale = WIDTH / second[-1][1]
    bottom = TOP + ROW * len(NODES)
    parts: list[str] = []

    def x(seconds: float) -> float:
        return round(LEFT + seconds * scale, 1)

    def line(x1: float, y1: float, x2: float, y2: float, style: str) -> None:
        parts.append(f'  <line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" {style}/>')

    def text(at: float, y: float, words: str, style: str = f'fill="{TEXT}"') -> None:
        parts.append(f'  <text x="{at}" y="{y}" font-size="12" {style}>{escape(words)}</text>')

    for row, node in enumerate(NODES):
        y = TOP + ROW * row
        text(16, y + 18, node)
        for steps in [first] if node == LOST else [first, second]:
            begin, end = x(steps[0][1]), x(steps[-1][1])
            parts.append(f'  <rect x="{begin}" y="{y}" width="{end - begin:.1f}" height="{BAR}" fill="{TRAINING}"/>')
    y = TOP + ROW * NODES.index(LOST)
    for begin, end in ((y, y + BAR), (y + BAR, y)):
        line(x(fault) - 6, begin, x(fault) + 6, end, f'stroke="{FAULT}" stroke-width="3"')
    text(x(first[0][1]), TOP - 30, f"steps {first[0][0]} to {first[-1][0]}")
    text(x(second[-1][1]), TOP - 30, f"steps {second[0][0]} to {second[-1][0]}", f'fill="{TEXT}" text-anchor="end"')
    shown = -20.0
    for number, (when, _) in enumerate(told["said"], 1):
        line(x(when), TOP - 6, x(when), bottom, f'stroke="{EVENT}" stroke-dasharray="4 3"')
        shown = max(x(when) - 4, shown + 11)  # those of one moment stand beside each other
        text(shown, TOP - 10, str(number), f'fill="{EVENT}"')
    line(LEFT, bottom, LEFT + WIDTH, bottom, f'stroke="{TEXT}"')
    for seconds in range(0, int(second[-1][1]) + 1, 5):
        text(x(seconds), bottom + 16, f"{seconds} s", f'fill="{TEXT}" text-anchor="middle"')
    text(
        LEFT, bottom + 44, f"✕ {fault:.1f} s: the network of {LOST} is cut, in step {told['struck']}", f'fill="{FAULT}"'
    )
    for number, (when, what) in enumerate(told["said"], 1):
        text(LEFT, bottom + 44 + 18 * number, f"{number} {when:.1f} s: {what}")
    last = bottom + 44 + 18 * (len(told["said"]) + 1)
    text(LEFT, last, f"{second[0][1]:.1f} s: step {second[0][0]}, the first after the newest checkpoint")
    height = last + 16
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 {height}" font-family="sans-serif" font-size="13">'
    )
    title = "  <title>A job of four nodes goes on with three after the network of one was cut</title>"
    dark = "  <style>@media (prefers-color-scheme: dark) { svg { filter: invert(0.9) hue-rotate(180deg) } }</style>"
    return "\n".join(
        [head, dark, title, f'  <rect width="860" height="{height}" fill="#ffffff"/>', *parts, "</svg>", ""]
    )


if __name__ == "__main__":
    (DOCS / "survival.svg").write_text(draw(json.loads((DOCS / "survival.json").read_text())))
