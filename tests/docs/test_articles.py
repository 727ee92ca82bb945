"""The pages of the articles and of the frameworks have one form, and the index names each of them."""

from __future__ import annotations

import re
import shlex

import pytest

from hpcddp.cli.main import main
from tests.docs.conftest import blocks_of

FORMS = {
    "articles": ["What it shows", "Its traps", "How to do it here"],
    "frameworks": ["What runs unchanged", "What one line adds", "What is said or refused"],
}
INDEX = {"articles": "docs/articles/README.md", "frameworks": "docs/frameworks.md"}


@pytest.mark.parametrize("folder", FORMS)
def test_each_page_has_the_sections_of_its_folder_and_is_in_the_index(folder, repo):
    pages = [page for page in sorted((repo / "docs" / folder).glob("*.md")) if page.name != "README.md"]
    assert pages
    index = (repo / INDEX[folder]).read_text(encoding="utf-8")
    for page in pages:
        assert re.findall(r"^## (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE) == FORMS[folder], page
        assert f"{page.name})" in index, page


def test_the_jobs_that_a_page_types_render(repo, monkeypatch, capsys):
    """What stands in `text` blocks, up to the pipe: `cd` moves among the jobs, `hpcddp render` makes a script."""
    rendered = 0
    for page in sorted((repo / "docs/articles").glob("*.md")):
        monkeypatch.chdir(repo)
        for line in (line for block in blocks_of(page) if block.language == "text" for line in block.text.splitlines()):
            words = shlex.split(line.partition("|")[0], comments=True)
            if words[0] == "cd":
                monkeypatch.chdir(words[1])
            else:
                assert words[:2] == ["hpcddp", "render"], (page, line)
                assert main(words[1:]) == 0, (page, line, capsys.readouterr().err)
                assert capsys.readouterr().out.startswith("#!/bin/bash")
                rendered += 1
    assert rendered > 25


def test_what_a_page_says_of_rt_exists(repo):
    known = re.findall(r"^\| `(\w+)` \|", (repo / "docs/api.md").read_text(encoding="utf-8"), re.MULTILINE)
    for page in (page for folder in FORMS for page in (repo / "docs" / folder).glob("*.md")):
        said = re.findall(r"`rt\.(\w+)", page.read_text(encoding="utf-8"))
        assert set(said) <= {*known}, page
