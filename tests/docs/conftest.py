"""The manual as data: README.md and docs/*.md, their fenced blocks, headings and links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

REPO = Path(__file__).parents[2]
PAGES = [REPO / "README.md", *sorted((REPO / "docs").rglob("*.md")), REPO / "CONTRIBUTING.md", REPO / "CHANGELOG.md"]


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(REPO)}:{self.line}"


def blocks() -> Iterator[Block]:
    """Every fenced block; a fence inside a list may be indented."""
    fence = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in fence.finditer(text):
            body = re.sub(rf"^{found[1]}", "", found[3], flags=re.MULTILINE)
            yield Block(page, text[: found.start()].count("\n") + 2, found[2], body)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `bash_block` or `python_block` runs once for each block of that language."""
    for language in ("bash", "python"):
        if f"{language}_block" in metafunc.fixturenames:
            metafunc.parametrize(f"{language}_block", [b for b in blocks() if b.language == language], ids=str)
    if "page" in metafunc.fixturenames:
        metafunc.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
