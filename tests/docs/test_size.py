"""The manual is short: few words in all, short sentences, short list items."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.conftest import JAPANESE, PAGES, REPO

MOST_WORDS = 33_500  # outside of blocks of code
MOST_WITH_CODE = 42_000
DOCS = [page for page in PAGES if page.is_relative_to(REPO / "docs") and page not in JAPANESE]
WRITTEN = [REPO / "README.md", *(page for page in DOCS if REPO / "docs/sites" not in page.parents)]


def words_of(text: str) -> list[str]:
    """What has a letter or a digit, between blanks: the bars of a table are no words."""
    return re.findall(r"\S*\w\S*", text)


def prose_of(page: Path) -> list[str]:
    """The paragraphs, list items and cells of tables of a page; code, and a list of it, count as one word."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"^( *)```.*?^\1```|<!--.*?-->", "\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"(`+).+?\1", "code", text)
    text = re.sub(r"code( \([\w ]+\))?(, code( \([\w ]+\))?)+", "code", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"^#+ .*$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"^\|(.*)\|$", lambda row: "\n" + row[1].replace("|", "\n\n") + "\n", text, flags=re.MULTILINE)
    text = re.sub(r"^ *(- |\d+\. )", r"\n\n- ", text, flags=re.MULTILINE)
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip()]


def too_long(parts: list[str]) -> list[str]:
    """Sentences of more than 40 words, and list items of more than 80."""
    sentences = [one for part in parts for one in re.split(r"(?<=[.?!])[)\"*]*\s+", part) if len(words_of(one)) > 40]
    return sentences + [part for part in parts if part.startswith("- ") and len(words_of(part)) > 80]


@pytest.mark.parametrize("short", WRITTEN, ids=lambda page: str(page.relative_to(REPO)))
def test_a_page_has_no_long_sentence_and_no_long_list_item(short):
    assert too_long(prose_of(short)) == []


def test_the_manual_without_the_pages_of_sites_has_few_words():
    """All words of text and tables; then with blocks of code, of which most are what tests type and compare."""
    text, all_words = {}, 0
    for page in WRITTEN:
        whole = page.read_text(encoding="utf-8")
        text[page.name] = len(words_of(re.sub(r"^( *)```.*?^\1```", "", whole, flags=re.DOTALL | re.MULTILINE)))
        all_words += len(words_of(whole))
    assert sum(text.values()) <= MOST_WORDS, sorted(text.items(), key=lambda item: -item[1])
    assert all_words <= MOST_WITH_CODE


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("word " * 40 + ".", 0),
        ("word " * 41 + ".", 1),
        ("`" + "word " * 90 + "`", 0),
        ("| a | " + "word " * 41 + " |", 1),
        ("- " + ("word " * 20 + ". ") * 4, 0),
        ("- " + ("word " * 20 + ". ") * 5, 1),
    ],
)
def test_what_is_long(text, found, tmp_path):
    (tmp_path / "page.md").write_text(text + "\n")
    assert len(too_long(prose_of(tmp_path / "page.md"))) == found
