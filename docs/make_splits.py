"""Draws docs/splits/*.svg: what each rank holds of a model of four layers, for each way to split it.

What they hold is in tests/jobs/splits.py, and tests/jobs/test_splits.py compares it with ranks that train. Run it
after changing one of the two: python docs/make_splits.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

from tests.jobs.splits import HELD, KINDS, LAYERS, Kind, held, samples  # noqa: E402  the tests are no package

_COLOURS = {"weights": "#4f7fb5", "gradients": "#d98841", "optimizer": "#6aa76a"}
_SIDE, _GAP = 26, 6  # pixels of a layer's matrix, and between two
_LABEL, _HEAD = 78, 40  # left of the first rank: the names of HELD; above the matrices
_RANK = LAYERS * (_SIDE + _GAP) + 14
_TOP = 56


def draw(kind: Kind) -> str:
    """Nodes side by side, ranks in them; in each rank a row of matrices for each of HELD."""
    ranks = range(len(kind.hosts))
    bottom = _TOP + _HEAD + len(HELD) * (_SIDE + _GAP)
    width, height = max(_LABEL + len(ranks) * (_RANK + 10) + 16, 700), bottom + 48
    drawn = [
        f'<text x="12" y="22" font-size="15" font-weight="bold">{escape(_title(kind))}</text>',
        f'<text x="12" y="41" font-size="12" fill="#555555">{escape(kind.says)}</text>',
        *_nodes(kind, bottom),
        *(
            f'<text x="{_LABEL - 8}" y="{_row(number) + 17}" font-size="12" text-anchor="end">{name}</text>'
            for number, name in enumerate(HELD)
        ),
    ]
    for rank in ranks:
        drawn += _rank(kind, rank)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
            "  <style>@media (prefers-color-scheme: dark) { svg { filter: invert(0.9) hue-rotate(180deg) } }</style>",
            "  <!-- made by docs/make_splits.py from tests/jobs/splits.py -->",
            f"  <title>{escape(_title(kind))}: what each rank holds</title>",
            f'  <rect width="{width}" height="{height}" fill="#ffffff"/>',
            '  <g fill="#222222">',
            *(f"    {line}" for line in drawn),
            "  </g>",
            "</svg>",
            "",
        ]
    )


def _title(kind: Kind) -> str:
    if kind.parallel is None:
        return {"pipeline": "pipeline, by hand", "two-devices": "a model over two devices, and DDP"}[kind.name]
    return f"parallel: {kind.parallel}".replace("'", "")


def _left(rank: int) -> int:
    return _LABEL + rank * (_RANK + 10)


def _row(number: int) -> int:
    return _TOP + _HEAD + number * (_SIDE + _GAP)


def _nodes(kind: Kind, bottom: int) -> Iterator[str]:
    for host in dict.fromkeys(kind.hosts):
        mine = [rank for rank, here in enumerate(kind.hosts) if here == host]
        x, width = _left(mine[0]) - 5, len(mine) * (_RANK + 10)
        yield f'<rect x="{x}" y="{_TOP}" width="{width - 2}" height="{bottom - _TOP + 38}" rx="6" fill="#f1f1f1"/>'
        yield f'<text x="{x + 8}" y="{bottom + 31}" font-size="11.5" fill="#555555">{host}</text>'


def _rank(kind: Kind, rank: int) -> Iterator[str]:
    number, parts = samples(kind, rank)
    sees = "all samples" if parts == 1 else f"samples {number + 1}/{parts}"
    x = _left(rank)
    yield f'<text x="{x + 4}" y="{_TOP + 17}" font-size="12" font-weight="bold">rank {rank}</text>'
    yield f'<text x="{x + _RANK - 12}" y="{_TOP + 17}" font-size="11.5" text-anchor="end">{sees}</text>'
    for layer in range(LAYERS):
        middle = x + 4 + layer * (_SIDE + _GAP) + _SIDE / 2
        yield f'<text x="{middle:g}" y="{_TOP + 35}" font-size="10" fill="#555555" text-anchor="middle">{layer}</text>'
    for line, (name, matrices) in enumerate(held(kind, rank).items()):
        for layer, part in enumerate(matrices):
            left, top = x + 4 + layer * (_SIDE + _GAP), _row(line)
            yield f'<rect x="{left}" y="{top}" width="{_SIDE}" height="{_SIDE}" fill="#ffffff" stroke="#bbbbbb"/>'
            if part:
                wide, high = (part.right - part.left) * _SIDE, (part.bottom - part.top) * _SIDE
                yield (
                    f'<rect x="{left + part.left * _SIDE:g}" y="{top + part.top * _SIDE:g}" width="{wide:g}" '
                    f'height="{high:g}" fill="{_COLOURS[name]}"/>'
                )
    if kind.name == "two-devices":
        for device in range(2):
            left = x + 2 + device * LAYERS // 2 * (_SIDE + _GAP)
            yield (
                f'<rect x="{left}" y="{_TOP + 24}" width="{LAYERS // 2 * (_SIDE + _GAP) - 3}" height='
                f'"{_row(len(HELD)) - _TOP - 24}" fill="none" stroke="#333333" stroke-dasharray="4 3"/>'
            )
            label = f"GPU {2 * rank + device}"
            yield f'<text x="{left + 18}" y="{_row(len(HELD)) + 15}" font-size="11">{label}</text>'


if __name__ == "__main__":
    (DOCS / "splits").mkdir(exist_ok=True)
    for kind in KINDS:
        (DOCS / "splits" / f"{kind.name}.svg").write_text(draw(kind), encoding="utf-8")
