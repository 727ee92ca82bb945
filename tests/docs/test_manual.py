"""The manual and the command line say the same: verbs, options, files."""

from __future__ import annotations

import argparse
import importlib
import re

import pytest

from hpcddp.cli.verbs import VERBS

LINK = re.compile(r"\]\(([^)\s]+)\)")


def whole_manual(repo):
    pages = [repo / "README.md", *(repo / "docs").rglob("*.md")]
    return "\n".join(page.read_text(encoding="utf-8") for page in pages)


def anchor(heading: str) -> str:
    """How the web page of a heading is called: lower case, no punctuation, dashes for spaces."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_a_link_leads_somewhere(page):
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, heading = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in map(anchor, headings), target


def test_a_path_of_the_repository_in_the_manual_exists(page, repo):
    text = page.read_text(encoding="utf-8")
    for path in re.findall(r"`((?:hpcddp|templates|jobs|tests|docs|benchmarks)/[^`{*]*)`", text):
        in_the_wheel = path.startswith("hpcddp/_")
        if not in_the_wheel and not re.search(r"[A-Z]{3}| |…", path):  # sites/NAME.yaml is an example
            assert (repo / path).exists(), path


def test_a_verb_in_the_manual_exists(page):
    text = page.read_text(encoding="utf-8")
    for verb in re.findall(r"(?:^|[`|] ?)hpcddp ([a-z]+)\b", text, re.MULTILINE):
        assert verb in VERBS, verb


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_and_option_is_in_the_manual(verb, repo):
    manual = whole_manual(repo)
    assert f"hpcddp {verb}" in manual
    parser = importlib.import_module(f"hpcddp.cli.{verb}").build_parser()
    for option, action in parser._option_string_actions.items():
        if option.startswith("--") and option != "--help" and action.help != argparse.SUPPRESS:
            assert re.search(rf"{option}\b", manual), option
