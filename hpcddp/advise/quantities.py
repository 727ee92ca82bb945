"""Memory and counts of parameters as people write them."""

from __future__ import annotations

import re

from hpcddp.errors import RequestError
from hpcddp.units import shorten

_BYTES = {"gb": 1e9, "gib": 2.0**30, "tb": 1e12, "tib": 2.0**40, "mb": 1e6, "mib": 2.0**20}
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_NUMBER = r"\d{1,18}(?:\.\d{1,9})?"
GIB = 2.0**30


def parse_memory(text: str, where: str) -> float:
    """Bytes of `80GB` (10^9) or `79.1GiB` (2^30). RequestError for another form."""
    found = re.fullmatch(rf"({_NUMBER}) *([a-zA-Z]+)", text.strip(), re.ASCII)
    if not found or found[2].lower() not in _BYTES or float(found[1]) == 0:
        raise RequestError(f"{where} {shorten(text)!r} is no size of memory", f"{where} 80GB, or {where} 79.1GiB")
    return float(found[1]) * _BYTES[found[2].lower()]


def parse_parameters(text: str, where: str) -> int:
    """A count as `7e9`, `7B`, `350M` or `6738415616`. RequestError for another form."""
    found = re.fullmatch(rf"({_NUMBER}(?:[eE]\+?\d{{1,2}})?) *([kKmMbBtT]?)", text.strip(), re.ASCII)
    value = float(found[1]) * _COUNTS[found[2].lower()] if found else 0.0
    if not 1 <= value < 1e16:
        raise RequestError(f"{where} {shorten(text)!r} is no count of parameters", f"{where} 7e9, or {where} 350M")
    return round(value)


def format_parameters(count: int) -> str:
    """`6.74e9` as people read it: 6.74 billion."""
    for size, word in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if count >= size:
            return f"{count / size:.3g} {word}"
    return str(count)


def format_gib(size: float) -> str:
    """GiB with a digit behind the point, two where it is small; `0` for nothing."""
    value = size / GIB
    if value == 0:
        return "0"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
