"""Bash words: any argument, path or value of a variable, quoted so that bash hands it on byte for byte."""

from __future__ import annotations

import re
from collections.abc import Iterable

from hpcddp.errors import RequestError

_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+").fullmatch
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
        raise RequestError(f"{text!r} holds a character that no program argument can carry", "leave the character out")
    if _CONTROL.search(text):
        escaped = "".join(_NAMED.get(c) or (f"\\{ord(c):03o}" if _CONTROL.match(c) else c) for c in text)
        return f"$'{escaped}'"
    return "'" + text.replace("'", "'\"'\"'") + "'"


def quote_words(words: Iterable[str]) -> str:
    """A command as one line of bash."""
    return " ".join(quote_word(w) for w in words)


def quote_path(path: str) -> str:
    """A bash word for `path`; a relative one hangs from the folder that the script has changed into."""
    return quote_word(path) if path.startswith("/") else '"$PWD"/' + quote_word(path)
