"""What a rendered script hands to the supervisor."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from hpcddp.cli.supervise import build_parser
from hpcddp.supervisor.order import Order, read_order


def words_in(text: str) -> list[str]:
    """The words behind `supervise`, with the shell's variables as they stand."""
    line = text[text.index("\nexec ") :].replace("\\\n", " ")
    words = shlex.split(line)
    return words[words.index("supervise") + 1 :]


def order_of(words: list[str], env: Mapping[str, str] | None = None) -> Order:
    cut = words.index("--")
    return read_order(vars(build_parser().read_words(words[:cut])), words[cut + 1 :], env or {})


def order_in(text: str) -> Order:
    return order_of(words_in(text))
