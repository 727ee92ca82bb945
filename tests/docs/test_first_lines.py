"""A page begins with what its reader can do after reading it, and a command with its output, before any section."""

from __future__ import annotations

import re

import pytest

from tests.docs.conftest import JAPANESE, PAGES, blocks_of
from tests.docs.test_blocks import typed_and_shown

BEGUN = [page for page in PAGES if page.name != "CHANGELOG.md"]  # a list of changes teaches nothing


@pytest.mark.parametrize("begun", BEGUN, ids=lambda page: "-".join(page.parts[-2:]))
def test_a_page_begins_with_what_its_reader_can_do_and_a_command_with_its_output(begun):
    head = begun.read_text(encoding="utf-8").partition("\n## ")[0]
    ability = "このページを読むと" if begun in JAPANESE else "After reading this page you can"
    text, fence, _ = re.sub(r"<!--.*?-->\n*", "", head).partition("```")
    assert ability in text
    assert begun.name == "README.md" or text.split("\n\n")[1].startswith(ability), "what comes first is something else"
    assert fence, "nothing is shown before the first section"
    first = next(blocks_of(begun))
    assert first.language == "console"
    assert any(shown for _, shown in typed_and_shown(first.text)), "a command shows its output"
