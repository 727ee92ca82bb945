"""Every picture of the manual can be read at 900 pixels, on a light and on a dark page; no line crosses a label."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PICTURES = sorted(DOCS.rglob("*.svg"))
SHOWN, LEAST = 900, 10  # pixels: a picture's width, and a letter's height
_LETTER = 0.6  # its width, as a part of its height, in a wide font
_GRID = {"#eee"}  # pale: labels stay legible on it


class Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float


def parts_of(picture: Path) -> Iterator[tuple[str, dict[str, str], str]]:
    """Each element's name, its attributes with those of the groups around it, and its text."""

    def walk(element: ElementTree.Element, around: dict[str, str]) -> Iterator[tuple[str, dict[str, str], str]]:
        own = around | element.attrib
        yield element.tag.rpartition("}")[2], own, "".join(element.itertext())
        for child in element:
            yield from walk(child, own)

    yield from walk(ElementTree.fromstring(picture.read_text(encoding="utf-8")), {})


def size_of(picture: Path, attributes: dict[str, str]) -> float:
    style = re.search(r"font: ?([\d.]+)px", picture.read_text(encoding="utf-8"))
    return float(style[1] if style else attributes["font-size"])


def labels_of(picture: Path) -> Iterator[tuple[str, Box]]:
    for name, attributes, text in parts_of(picture):
        if name == "text":
            size = size_of(picture, attributes)
            width = float(attributes.get("textLength", _LETTER * size * len(text)))
            before = {"end": 1.0, "middle": 0.5}.get(attributes.get("text-anchor", ""), 0.0)
            left, base = float(attributes["x"]) - before * width, float(attributes["y"])
            yield text, Box(left, base - 0.6 * size, left + width, base)


def lines_of(picture: Path) -> Iterator[Box]:
    """Straight lines, and the pieces of curves, as boxes."""
    for name, attributes, _ in parts_of(picture):
        if name == "line" and attributes.get("stroke") not in _GRID:
            x1, x2, y1, y2 = (float(attributes[key]) for key in ("x1", "x2", "y1", "y2"))
            yield Box(min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2))
        if name == "polyline":
            points = [tuple(map(float, point.split(","))) for point in attributes["points"].split()]
            for (x1, y1), (x2, y2) in itertools.pairwise(points):
                yield Box(min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2))


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_a_picture_has_colours_for_a_dark_page(picture):
    assert "@media (prefers-color-scheme: dark)" in picture.read_text(encoding="utf-8")


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_letters_are_large_enough_at_the_width_of_a_page(picture):
    (_, root, _), *parts = parts_of(picture)
    scale = SHOWN / float(root["viewBox"].split()[2])
    sizes = {size_of(picture, attributes) for name, attributes, _ in parts if name == "text"}
    assert min(sizes) * scale >= LEAST


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_no_line_crosses_a_label(picture):
    lines = list(lines_of(picture))
    crossed = [
        (label, line)
        for label, box in labels_of(picture)
        for line in lines
        if line.left < box.right and line.right > box.left and line.top < box.bottom and line.bottom > box.top
    ]
    assert not crossed
