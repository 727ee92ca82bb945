"""The pages of the frameworks have one form and are in the index; the jobs of the articles render."""

from __future__ import annotations

import re
import shlex

from hpcddp.cli.main import main
from tests.docs.conftest import blocks_of

FORM = ["What runs unchanged", "What one line adds", "What is said or refused"]


def test_each_page_of_a_framework_has_the_same_sections_and_is_in_the_index(repo):
    pages = sorted((repo / "docs/frameworks").glob("*.md"))
    assert pages
    index = (repo / "docs/frameworks.md").read_text(encoding="utf-8")
    for page in pages:
        assert re.findall(r"^## (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE) == FORM, page
        assert f"{page.name})" in index, page


def test_the_jobs_that_the_page_types_render(repo, monkeypatch, capsys):
    """What stands in `text` blocks, up to the pipe: `cd` moves among the jobs, `hpcddp render` makes a script."""
    rendered = 0
    monkeypatch.chdir(repo)
    blocks = [block for block in blocks_of(repo / "docs/articles.md") if block.language == "text"]
    for line in (line for block in blocks for line in block.text.splitlines()):
        words = shlex.split(line.partition("|")[0], comments=True)
        if words[0] == "cd":
            monkeypatch.chdir(words[1])
        else:
            assert words[:2] == ["hpcddp", "render"], line
            assert main(words[1:]) == 0, (line, capsys.readouterr().err)
            assert capsys.readouterr().out.startswith("#!/bin/bash")
            rendered += 1
    assert rendered > 25


def test_every_job_that_the_page_names_is_typed_on_it(repo):
    """Each article has a row whose job renders; one that other jobs stand for (a data set of images) is named alone."""
    text = (repo / "docs/articles.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`jobs/(\w+)/([\w-]+\.yaml)`", text.partition("## Traps")[0]))
    typed = set(re.findall(r"^hpcddp render ([\w-]+\.yaml)", text, re.MULTILINE))
    assert {name for _, name in named} - typed == {"mnist.yaml", "one-node.yaml"}


def test_what_a_page_says_of_rt_exists(repo):
    known = re.findall(r"^\| `(\w+)` \|", (repo / "docs/api.md").read_text(encoding="utf-8"), re.MULTILINE)
    for page in (repo / "docs/articles.md", *(repo / "docs/frameworks").glob("*.md")):
        said = re.findall(r"`rt\.(\w+)", page.read_text(encoding="utf-8"))
        assert set(said) <= {*known}, page
