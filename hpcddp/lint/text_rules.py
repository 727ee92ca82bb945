"""Mistakes in the text of a script, which make bash read other commands than it shows."""

from __future__ import annotations

from collections.abc import Iterator

from hpcddp.lint.directive import UNIX_LINES, numbered
from hpcddp.lint.finding import Said
from hpcddp.lint.script import PREFIXES, Script, unix_lines
from hpcddp.lint.shell import find_open_document


def open_document(script: Script) -> Iterator[Said]:
    """A24: a here-document without an end takes the rest of the script."""
    found = find_open_document(unix_lines(script.text))
    if found is None:
        return
    lines = numbered(unix_lines(script.text))[found.line :]
    alike = next((number for number, line in lines if line.strip() == found.end), 0)
    what = f"the here-document <<{found.end} never ends: the rest of the script is its text, and no command"
    what += f" (line {alike} has blanks beside {found.end})" if alike else ""
    yield Said(found.line, what, f"{found.end} alone on a line, without blanks (behind <<- tabs may stand before it)")


def carriage_returns(script: Script) -> Iterator[Said]:
    """A25: CR LF where no scheduler is known to refuse it (D1 otherwise). The first line that counts."""
    if script.scheduler != "gridengine":
        return
    for number, line in numbered(script.text):
        counts = line.startswith(PREFIXES[script.scheduler]) or not line.lstrip().startswith("#")
        if line.endswith("\r") and line.strip() and counts:
            what = "the line ends in CR LF: the carriage return is a part of its last word, as in train.py\\r"
            yield Said(number, what, UNIX_LINES)
            return
