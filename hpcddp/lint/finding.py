"""What a rule says, and what a rule is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from hpcddp.lint.script import Script


class Said(NamedTuple):
    """A mistake: its line, what is so, and what hpcddp would write."""

    line: int
    what: str
    instead: str


class Rule(NamedTuple):
    """One mistake. `certain`: an error on every site. Otherwise it depends on the site, and lint reports a warning."""

    id: str
    certain: bool
    check: Callable[[Script], Iterator[Said]]


class Finding(NamedTuple):
    """A mistake in a file, as it is reported."""

    file: str
    line: int
    rule: str
    kind: str
    what: str
    instead: str
