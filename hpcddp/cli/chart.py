"""A curve as lines of text: of braille characters, eight dots each, or of stars where the terminal has no braille."""

from __future__ import annotations

from collections.abc import Sequence

_BRAILLE = 0x2800
# The bit of each dot of a braille character: by its row from above, by its column.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def dots_across(width: int, *, plain: bool = False) -> int:
    """How many values a curve of this many characters shows."""
    return width if plain else 2 * width


def draw_curve(values: Sequence[float | None], width: int, height: int, *, plain: bool = False) -> list[str]:
    """`height` lines of at most `width` characters; the largest value is at the top, None is a gap. `plain`: stars."""
    down, across = (1, 1) if plain else (4, 2)
    known = [value for value in values if value is not None]
    if not known or width < 1 or height < 1:
        return []
    low, high = min(known), max(known)
    rows = height * down
    cells = [[0] * width for _ in range(height)]
    before: int | None = None
    for column, value in enumerate(values[: width * across]):
        if value is None:
            before = None
            continue
        above = (high - value) / (high - low) if high > low else 0.5
        row = min(round(above * (rows - 1)), rows - 1)
        for y in _between(before, row):
            cells[y // down][column // across] |= 1 if plain else _DOTS[y % down][column % across]
        before = row
    return ["".join(_character(bits, plain=plain) for bits in line).rstrip() for line in cells]


def _between(before: int | None, row: int) -> range:
    """The rows that join this point to the one before it, so that a steep curve has no holes."""
    if before is None or abs(before - row) < 2:
        return range(row, row + 1)
    return range(before + 1, row + 1) if before < row else range(row, before)


def _character(bits: int, *, plain: bool) -> str:
    return " " if not bits else "*" if plain else chr(_BRAILLE + bits)
