"""README.md shows what differs between the scripts of jobs/tutorial, and the picture that docs/make_screen.py draws."""

from __future__ import annotations

import difflib
import importlib.util
from xml.etree import ElementTree

from tests.docs.conftest import blocks_of


def lines_of(text: str) -> list[str]:
    """Without indentation and blank lines: a `with` around a loop changes no line of it."""
    return [line.strip() for line in text.splitlines() if line.strip()]


def test_the_readme_shows_each_line_that_differs_between_the_plain_script_and_hpcddps(repo):
    plain, changed = (lines_of((repo / f"jobs/tutorial/{name}.py").read_text()) for name in ("plain", "train"))
    (shown,) = [block.text for block in blocks_of(repo / "README.md") if block.language == "diff"]
    shown_lines = [line[0] + line[1:].strip() for line in shown.splitlines()]
    differing = [line for line in difflib.ndiff(plain, changed) if line[0] in "+-"]
    assert sorted(shown_lines) == sorted(line[0] + line[2:] for line in differing)


def test_the_picture_of_the_screen_has_the_frame_and_the_colours_that_its_script_draws(repo):
    spec = importlib.util.spec_from_file_location("make_screen", repo / "docs/make_screen.py")
    assert spec
    assert spec.loader
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    text = (repo / "docs/watch.svg").read_text(encoding="utf-8")
    assert text.partition("<rect")[0] == maker.draw([[]] * maker.HEIGHT).partition("<rect")[0]
    words = " ".join(part.text or "" for part in ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}text"))
    assert all(word in words for word in ("train running step", "checkpoint", "loss", "attempts", "log"))


def test_the_readme_is_short(repo):
    assert len((repo / "README.md").read_text(encoding="utf-8").split()) <= 900
