"""The manual as data: README.md and docs/*.md, their fenced blocks, headings and links."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

REPO = Path(__file__).parents[2]
JAPANESE = sorted((REPO / "docs/ja").glob("*.md"))
OTHERS = [REPO / name for name in ("jobs/README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES = [REPO / "README.md", *sorted((REPO / "docs").rglob("*.md")), *OTHERS]


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    info: str  # what follows the language on the fence's line
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(REPO)}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    """Every fenced block of a page; a fence inside a list may be indented."""
    fence = re.compile(r"^( *)```(\w*) *([^\n]*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
    text = page.read_text(encoding="utf-8")
    for found in fence.finditer(text):
        body = re.sub(rf"^{found[1]}", "", found[4], flags=re.MULTILINE)
        yield Block(page, text[: found.start()].count("\n") + 2, found[2], found[3], body)


@functools.cache
def blocks() -> tuple[Block, ...]:
    """Every fenced block of the English pages: the Japanese ones have the same (test_japanese.py)."""
    return tuple(block for page in PAGES if page not in JAPANESE for block in blocks_of(page))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `bash_block` or `python_block` runs once for each such block, `page` once for each page.

    `training_block` is a python block that opens `hpcddp.runtime`: README's is a short test, the others are long ones.
    `japanese_page` is each page of docs/ja.

    `console` is all that a page's console blocks show, in order: one session of the reader. Where a fence says
    ```console slow, the page's whole session is a long test, and the session without that block is a short one.
    ```bash slow is a long test; `long_block` is what such a block types.
    """
    for language in ("bash", "python"):
        if f"{language}_block" in metafunc.fixturenames:
            found = [b for b in blocks() if b.language == language]
            cases = [pytest.param(b, id=str(b), marks=[pytest.mark.slow] if b.info == "slow" else []) for b in found]
            metafunc.parametrize(f"{language}_block", cases)
    if "long_block" in metafunc.fixturenames:
        metafunc.parametrize("long_block", [b for b in blocks() if (b.language, b.info) == ("bash", "slow")], ids=str)
    if "training_block" in metafunc.fixturenames:
        found = [b for b in blocks() if b.language == "python" and "with hpcddp.runtime(" in b.text]
        slow = [[] if b.page.name == "README.md" else [pytest.mark.slow] for b in found]
        cases = [pytest.param(b, id=str(b), marks=marks) for b, marks in zip(found, slow, strict=True)]
        metafunc.parametrize("training_block", cases)
    if "japanese_page" in metafunc.fixturenames:
        metafunc.parametrize("japanese_page", JAPANESE, ids=lambda page: page.name)
    if "page" in metafunc.fixturenames:
        metafunc.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
    if "console" in metafunc.fixturenames:
        cases = []
        for page in PAGES:
            shown = [b for b in blocks() if b.page == page and b.language == "console"]
            short, name = [b for b in shown if b.info != "slow"], str(page.relative_to(REPO))
            if short:
                # the pages of sites are made, and compared with what makes them: one is typed in short
                is_made = page.parent.name == "sites" and page.stem != "abci3"
                marks = [pytest.mark.slow] if is_made else []
                cases.append(pytest.param("".join(b.text for b in short), id=name, marks=marks))
            if short != shown:
                cases.append(pytest.param("".join(b.text for b in shown), id=f"{name} whole", marks=pytest.mark.slow))
        metafunc.parametrize("console", cases)
