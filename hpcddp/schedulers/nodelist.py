"""Slurm's two compressed forms: host lists (`node[001-003,7],login1`) and run lengths (`2(x3),1`).

Written out because `scontrol show hostnames` is not there in containers and on some compute nodes.
"""

from __future__ import annotations

from hpcddp.errors import LaunchError
from hpcddp.record import TYPE_CHECKING
from hpcddp.units import read_number, shorten

if TYPE_CHECKING:
    pass


_MOST = 1 << 20  # hosts: a garbled list must not take a login node's memory


def expand_nodelist(text: str, where: str = "nodelist") -> list[str]:
    """The hosts of a Slurm host list, in its order. `where` names the source in the error.

    Zero padding is kept (`n[08-11]` is n08 … n11), brackets may be several (`rack[1-2]n[1-2]`: the last turns
    fastest) and be followed by a suffix (`n[1-2]-ib`). LaunchError on a form that is not one of these.
    """
    hosts: list[str] = []
    for name in _split_names(text, where):
        if "[" not in name:
            hosts.append(name)
            continue
        grown = [""]
        rest = name
        while rest:
            before, _, rest = rest.partition("[")
            inside, closed, rest = rest.partition("]")
            numbers = _expand_numbers(inside, text, where) if closed else [""]
            if len(grown) * len(numbers) > _MOST:
                raise _bad(text, where)
            grown = [start + before + number for start in grown for number in numbers]
        hosts += grown
    return hosts


def _split_names(text: str, where: str) -> list[str]:
    """The comma-separated names; commas inside brackets belong to the name. Linear: a list may hold 100,000."""
    text = text.strip()
    # Each "[" takes the next "]" below, so equal counts leave none over.
    if len(text.split()) != 1 or text.count("[") != text.count("]"):
        raise _bad(text, where)
    names: list[str] = []
    begin = at = 0
    opening = text.find("[")
    while opening >= 0:
        comma = text.find(",", at)
        if 0 <= comma < opening:
            names.append(text[begin:comma])
            begin = at = comma + 1
        else:
            at = text.find("]", opening) + 1
            if at == 0:
                raise _bad(text, where)
            opening = text.find("[", at)
    # What is left of the last bracketed name, and the plain names behind it.
    end = text.find(",", at)
    names += [text[begin:]] if end < 0 else [text[begin:end], *text[end + 1 :].split(",")]
    if "" in names:
        raise _bad(text, where)
    return names


def _expand_numbers(inside: str, text: str, where: str) -> list[str]:
    numbers: list[str] = []
    for part in inside.split(","):
        if part.isdigit():
            numbers.append(part)
            continue
        low, _, high = part.partition("-")
        first, last = read_number(low), read_number(high)
        if first is None or last is None or not first <= last < first + _MOST:
            raise _bad(text, where)
        numbers += [f"{n:0{len(low)}d}" for n in range(first, last + 1)]
    if not inside.isascii():  # other scripts' digits are digits to Python
        raise _bad(text, where)
    return numbers


def expand_counts(text: str, where: str = "tasks per node") -> list[int]:
    """The numbers of a run-length list: `2(x3),1` is 2, 2, 2, 1. LaunchError on another form."""
    counts: list[int] = []
    for part in text.strip().split(","):
        count, times, repeat = part.partition("(x")
        repeat = repeat[:-1] if times and repeat.endswith(")") else ("" if times else "1")
        each, nodes = read_number(count), read_number(repeat)
        if each is None or nodes is None or nodes > _MOST:
            raise LaunchError(f"{where} {shorten(text)!r} is not a list of counts", "expected a form like 2(x3),1")
        counts += [each] * nodes
    return counts


def _bad(text: str, where: str) -> LaunchError:
    return LaunchError(f"{where} {shorten(text)!r} is not a host list", "expected a form like node[001-003],login1")
