"""The commands of a bash script, as far as one can know them without running it: words, assignments, lines.

Quotes are removed from words, `$` stays as it is written. Here-documents are skipped, substitutions and the text of
`bash -c` are read as well. What bash would refuse is read as far as it goes.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import NamedTuple

_RESERVED = {"if", "then", "elif", "else", "fi", "do", "done", "while", "until", "!", "{", "}", "time", "exec", "nohup"}
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\+?=)(.*)", re.DOTALL)


class Command(NamedTuple):
    """A simple command; `text` is as it stands. `nested`: it stands in the text that another command hands to a shell,
    and so runs wherever that one puts it. `into`: the programs behind its pipe."""

    line: int
    words: tuple[str, ...]
    sets: tuple[tuple[str, str], ...]
    text: str
    nested: bool = False
    into: tuple[str, ...] = ()

    @property
    def program(self) -> str:
        """The first word without its folder; empty for a bare assignment."""
        return self.words[0].rsplit("/", 1)[-1] if self.words else ""


def read_commands(text: str, first_line: int = 1, nested: bool = False) -> list[Command]:
    """Every command, in the order in which its end is read."""
    return _Reader(text, first_line, nested).read()


class OpenDocument(NamedTuple):
    """A here-document that no line ends: where it begins, and the word that was to end it."""

    line: int
    end: str


def find_open_document(text: str) -> OpenDocument | None:
    """The here-document that takes the rest of the script; None where each has its end."""
    reader = _Reader(text, 1, nested=False)
    reader.read()
    return reader.open_document


class _Reader:
    """One pass over the text. A class because a dozen functions would hand the same six values to each other."""

    def __init__(self, text: str, first_line: int, nested: bool) -> None:
        self.text = text
        self.at = 0
        self.first_line = first_line
        self.nested = nested
        self.found: list[Command] = []
        self.words: list[str] = []
        self.word: str | None = None
        self.start = 0
        self.documents: list[tuple[OpenDocument, str]] = []  # each with what may stand before its end
        self.open_document: OpenDocument | None = None
        self.pipeline: list[int] = []  # the commands whose output goes into the one that is being read

    def read(self) -> list[Command]:
        text = self.text
        while self.at < len(text):
            c = text[self.at]
            if c == "#" and self.word is None:
                self.at = self._find("\n")
            elif c == "\\":
                if text[self.at + 1 : self.at + 2] != "\n":
                    self._add(text[self.at + 1 : self.at + 2])
                self.at += 2
            elif c in "'\"":
                self._quoted(c)
            elif c in "$`":
                self._expansion()
            elif c in "<>":
                self._redirection()
            elif c in " \t":
                self._end_word()
                self.at += 1
            elif text.startswith("((", self.at) and (end := _arithmetic_end(text, self.at)):
                self.at = end
            elif c in "\n;&|()":
                self._end_command()
                if (
                    c == "|"
                    and "|" not in (text[self.at - 1 : self.at], text[self.at + 1 : self.at + 2])
                    and self.found
                ):
                    self.pipeline.append(len(self.found) - 1)
                self.at += 1
                if c == "\n":
                    self._skip_documents()
            else:
                self._add(c)
                self.at += 1
        self._end_command()
        return self.found

    def _add(self, text: str) -> None:
        if self.word is None and not self.words:
            self.start = self.at
        self.word = (self.word or "") + text

    def _find(self, wanted: str) -> int:
        at = self.text.find(wanted, self.at)
        return len(self.text) if at < 0 else at

    def _line(self, at: int) -> int:
        return self.first_line + self.text.count("\n", 0, at)

    def _quoted(self, quote: str) -> None:
        self._add("")
        self.at += 1
        while self.at < len(self.text) and self.text[self.at] != quote:
            c = self.text[self.at]
            if quote == '"' and c in "$`":
                self._expansion()
                continue
            if quote == '"' and c == "\\" and self.text[self.at + 1 : self.at + 2] in {'"', "\\", "$", "`"}:
                self.at += 1
                c = self.text[self.at]
            self._add(c)
            self.at += 1
        self.at += 1

    def _expansion(self) -> None:
        """`$x`, `${…}`, `$(…)`, `$((…))`, backquotes: kept as written; the commands of a substitution are read, too."""
        text, start = self.text, self.at
        if text.startswith("$'", start):
            self.at += 1
            self._quoted("'")
            return
        if text.startswith(("$(", "${"), start):
            self.at = _closing(text, start + 1)
            inner, arithmetic = text[start + 2 : self.at - 1], text.startswith("$((", start)
            if text[start + 1] == "(" and not arithmetic:
                self.found += read_commands(inner, self._line(start), self.nested)
        elif text[start] == "`":
            self.at += 1
            self.at = min(self._find("`") + 1, len(text))
            self.found += read_commands(text[start + 1 : self.at - 1], self._line(start), self.nested)
        else:
            self.at += 1
        end, self.at = self.at, start
        self._add(text[start:end])
        self.at = max(end, start + 1)

    def _redirection(self) -> None:
        """An operator and the word behind it. `<(…)` is read like a substitution."""
        if (self.word or "").isdecimal():
            self.word = None
        self._end_word()
        operator = re.compile(r"<<<|<<-?|<&|<>|<|>>|>&|>\||>").match(self.text, self.at)
        assert operator is not None  # the caller saw < or >
        self.at = operator.end()
        if self.text.startswith("(", self.at):
            return
        target = re.compile(r"[ \t]*('[^'\n]*'|\"[^\"\n]*\"|[^\s;&|<>()]+)").match(self.text, self.at)
        if target:
            self.at = target.end()
            if operator[0] in {"<<", "<<-"}:
                found = OpenDocument(self._line(self.at), re.sub(r"['\"\\]", "", target[1]))
                self.documents.append((found, r"\t*" if operator[0] == "<<-" else ""))

    def _skip_documents(self) -> None:
        for found, before in self.documents:
            closing = re.compile(rf"^{before}{re.escape(found.end)}$", re.MULTILINE).search(self.text, self.at)
            self.open_document = self.open_document or (None if closing else found)
            self.at = closing.end() if closing else len(self.text)
        self.documents = []

    def _end_word(self) -> None:
        if self.word is not None:
            self.words.append(self.word)
        self.word = None

    def _end_command(self) -> None:
        self._end_word()
        words, self.words = self.words, []
        while words and words[0] in _RESERVED:
            words.pop(0)
        sets: list[tuple[str, str]] = []
        declares = bool(words) and words[0] in {"export", "declare", "local", "readonly"}
        for word in words[1:] if declares else list(words):
            assignment = _ASSIGNMENT.fullmatch(word)
            if assignment:
                sets.append((assignment[1], assignment[2]))
            elif not declares:
                break
        if not declares:
            words = words[len(sets) :]
        if not words and not sets:
            return
        text = self.text[self.start : self.at].strip()
        line = self._line(self.start)
        self.found.append(Command(line, tuple(words), tuple(sets), text, self.nested))
        for at in self.pipeline:
            self.found[at] = self.found[at]._replace(into=(*self.found[at].into, self.found[-1].program))
        if self.text[self.at : self.at + 1] != "|":
            self.pipeline = []
        for flag, script in pairwise(words):
            if re.fullmatch(r"-[a-z]*c", flag) and any(w.rsplit("/", 1)[-1] in {"bash", "sh"} for w in words):
                self.found += read_commands(script, line, nested=True)


def _arithmetic_end(text: str, at: int) -> int:
    """Behind `((…))`, in which << is no here-document; 0 where two subshells begin."""
    end = _closing(text, at)
    return end if text.startswith("))", end - 2) else 0


def _closing(text: str, at: int) -> int:
    """Behind the bracket that closes the one at `at`; quotes within are skipped."""
    pairs = {"(": ")", "{": "}"}
    depth, opening, closing = 0, text[at], pairs[text[at]]
    while at < len(text):
        c = text[at]
        if c == "\\":
            at += 1
        elif c in "'\"" and (c == '"' or opening == "("):
            end = text.find(c, at + 1)
            at = len(text) if end < 0 else end
        depth += (c == opening) - (c == closing)
        at += 1
        if depth == 0:
            break
    return min(at, len(text))
