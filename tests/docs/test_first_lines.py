"""A page begins with one sentence on what it is for, and a command with its output, before any section."""

from __future__ import annotations

import re

import pytest

from tests.docs.conftest import JAPANESE, PAGES, blocks_of
from tests.docs.test_blocks import typed_and_shown

BEGUN = [page for page in PAGES if page.name != "CHANGELOG.md"]  # a list of changes teaches nothing


@pytest.mark.parametrize("begun", BEGUN, ids=lambda page: "-".join(page.parts[-2:]))
def test_a_page_begins_with_what_it_is_for_and_a_command_with_its_output(begun):
    head = begun.read_text(encoding="utf-8").partition("\n## ")[0]
    purpose = "このページでは" if begun in JAPANESE else "This page (shows|says|lists) "
    text, fence, _ = re.sub(r"<!--.*?-->\n*", "", head).partition("```")
    assert re.search(purpose, text)
    assert begun.name == "README.md" or re.match(purpose, text.split("\n\n")[1]), "what comes first is something else"
    assert fence, "nothing is shown before the first section"
    first = next(block for block in blocks_of(begun) if block.language != "diff")  # README.md: what changes in a script
    assert first.language == "console"
    assert any(shown for _, shown in typed_and_shown(first.text)), "a command shows its output"
