"""Bash words: any argument, path or value of a variable, quoted so that bash hands it on byte for byte."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from hpcddp.errors import RequestError
from hpcddp.ranks.launch_line import FromShell, IfSet

if TYPE_CHECKING:
    from hpcddp.ranks.launch_line import Word

#: Bytes of a program's longest argument: Linux' MAX_ARG_STRLEN without its NUL. Measured: 131071 run, 131072 do not.
LONGEST_ARGUMENT = 131071
_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+").fullmatch
_OPTION = re.compile(r"(--[\w-]+=)(.+)", re.DOTALL | re.ASCII).fullmatch
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_UNCARRIED = re.compile(r"[\x00\ud800-\udfff]").search
_NAMED = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\\": "\\\\", "'": "\\'"}


def quote_word(text: str) -> str:
    """`text` as one bash word on one line: no line of a script starts with a user's text, and none holds a CR.

    Control characters become `$'...'` escapes. Raises RequestError for NUL and broken UTF-8, which nothing can carry.
    """
    if _PLAIN(text):
        return text
    if _UNCARRIED(text):
        # where Python's own encoding is ASCII (LC_ALL=C with PYTHONUTF8=0), it takes every other character for broken
        hint = "leave the character out" if sys.getfilesystemencoding() == "utf-8" else "export PYTHONUTF8=1"
        raise RequestError(f"{text!r} holds a character that no program argument can carry", hint)
    if _CONTROL.search(text):
        escaped = "".join(_NAMED.get(c) or (f"\\{ord(c):03o}" if _CONTROL.match(c) else c) for c in text)
        return f"$'{escaped}'"
    return "'" + text.replace("'", "'\"'\"'") + "'"


def quote_words(words: Iterable[str]) -> str:
    """A command as one line of bash."""
    return " ".join(quote_word(w) for w in words)


def quote_line(words: Iterable[Word]) -> str:
    """Words of a launcher's command line: a shell variable stays one, in double quotes."""
    return " ".join(map(_quote_launch_word, words))


def _quote_launch_word(word: Word) -> str:
    if isinstance(word, IfSet):
        return f"${{{word.variable}:+{quote_words(word.words)}}}"
    if isinstance(word, FromShell):
        after = "" if word.after is None else quote_word(word.after)
        return f'{word.before and quote_word(word.before)}"{word.text}"{after}'
    option = _OPTION(word)  # only its value is quoted
    return option[1] + quote_word(option[2]) if option else quote_word(word)


def quote_path(path: str) -> str:
    """A bash word for `path`; a relative one hangs from the folder that the script has changed into."""
    return quote_word(path) if path.startswith("/") else '"$PWD"/' + quote_word(path)
