"""docs/metrics.md lists what is recorded: no key and no name more or less."""

from __future__ import annotations

import re

from hpcddp.runs.compare import KINDS
from hpcddp.runs.metrics import RESERVED, StepLine


def section(repo, heading: str) -> str:
    text = (repo / "docs/metrics.md").read_text(encoding="utf-8")
    found = re.search(rf"^##+ {re.escape(heading)}\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, heading
    return found[1]


def first_cells(text: str) -> set[str]:
    return {name for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}


def test_the_keys_of_steps_are_those_that_are_read(repo):
    assert first_cells(section(repo, "kind `step`")) == set(StepLine._fields) - {"time"}


def test_the_kinds_and_the_names_that_are_taken_are_on_the_page(repo):
    assert all(f"`{kind}`" in section(repo, "As a table") for kind in KINDS)
    assert all(f"`{name}`" in section(repo, "kind `log`") for name in RESERVED)
