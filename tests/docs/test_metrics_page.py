"""docs/metrics.md lists what is recorded: no key and no name more or less."""

from __future__ import annotations

import re

from hpcddp.runs.compare import KINDS
from hpcddp.runs.metrics import RESERVED


def section(repo, heading: str) -> str:
    text = (repo / "docs/metrics.md").read_text(encoding="utf-8")
    found = re.search(rf"^##+ {re.escape(heading)}\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, heading
    return found[1]


def test_the_kinds_and_the_names_that_are_taken_are_on_the_page(repo):
    assert all(f"`{kind}`" in section(repo, "As a table") for kind in KINDS)
    assert all(f"`{name}`" in section(repo, "kind `log`") for name in RESERVED)
