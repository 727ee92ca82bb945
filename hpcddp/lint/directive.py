"""What a scheduler takes from a script's directives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

Tokens = tuple[str, ...]
UNIX_LINES = r"line ends of Unix: sed -i 's/\r$//' FILE"


class Option(NamedTuple):
    """One option, with the line it stands on (from 1). A resource is an option of its own: `-l select`."""

    name: str
    value: str
    line: int

    @property
    def text(self) -> str:
        """It as a message shows it: `-p 5000`, `-l mem=4gb`; a value that is hard to see in quotes."""
        plain = self.value and " " not in self.value and not self.value.endswith(":")
        return f"{self.name}{'=' if ' ' in self.name else ' '}{self.value if plain else repr(self.value)}"


class Refusal(NamedTuple):
    """Why the scheduler refuses the whole script, at which line, and what to write."""

    line: int
    why: str
    instead: str = "one option per line, no comment behind it"


class ScriptDirectives(NamedTuple):
    """One scheduler's reading of a script; `unread` are lines that look like directives and are none to it.

    `torque`: a script for Torque's qsub, whose values are not PBS's. `other_words`: what begins another component of a
    job; the options are the first one's.
    """

    scheduler: str
    options: tuple[Option, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    unread: tuple[int, ...] = ()
    command_line: int = 0
    torque: bool = False
    other_words: tuple[str, ...] = ()

    def all(self, *names: str) -> list[Option]:
        """Every option of these names, in the order of the script."""
        return [o for o in self.options if o.name in names]

    def get(self, *names: str) -> Option | None:
        """The one that counts: PBS keeps the first of two resources; else the last wins, on every scheduler."""
        found = self.all(*names)
        if not found:
            return None
        return found[0] if self.scheduler == "pbs" and found[0].name.startswith("-l ") else found[-1]


class UnmatchedError(ValueError):
    """A quote that opens and does not close."""


class ListError(ValueError):
    """The value of an option is a list, and is not written like one."""


def numbered(text: str) -> list[tuple[int, str]]:
    """Lines with their numbers. Only a line feed ends a line here: schedulers know no other end."""
    return list(enumerate(text.split("\n"), 1))


def split_options(words: Tokens, takes_value: Callable[[str], bool | None]) -> Iterator[tuple[str, str | None]]:
    """getopt over short options: (`-N`, value), (`-V`, ""), ("?", word) for a stray one, (`-Z`, None) for an unknown.

    `takes_value` says it for a letter, None for a letter that is no option. Raises UnmatchedError for a missing value.
    """
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            yield from (("?", left) for left in rest or [word])
            return
        if not word.startswith("-") or word == "-":
            yield "?", word
            continue
        letters = word[1:]
        while letters:
            letter, letters = letters[0], letters[1:]
            takes = takes_value(letter)
            if takes is None:
                yield f"-{letter}", None
            elif not takes:
                yield f"-{letter}", ""
            else:
                if not letters and not rest:
                    raise UnmatchedError(f"-{letter} without a value")
                yield f"-{letter}", letters or rest.pop(0)
                letters = ""
