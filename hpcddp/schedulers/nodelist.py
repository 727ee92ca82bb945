"""Slurm's two compressed forms: host lists (`node[001-003,7],login1`) and run lengths (`2(x3),1`).

Written out because `scontrol show hostnames` is not there in containers and on some compute nodes.
"""

from __future__ import annotations

from hpcddp.errors import LaunchError
from hpcddp.record import TYPE_CHECKING
from hpcddp.units import read_number, shorten

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


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


def same_host(a: str, b: str) -> bool:
    """Whether two names mean one host by their first labels; addresses are compared whole.

    A scheduler's file says `node001.hpc.test` where `hostname` says `node001`.
    """
    a, b = a.lower().rstrip("."), b.lower().rstrip(".")
    return a == b or (not is_address(a) and not is_address(b) and a.partition(".")[0] == b.partition(".")[0])


def holds(hosts: Sequence[str], names: Iterable[str]) -> bool:
    """Whether one of the names can be one of the hosts'."""
    known = [name for name in names if name]
    if any(name in hosts for name in known):  # the usual case, at the speed of C: there may be 100,000 hosts
        return True
    return any(is_alias(host, name) or is_alias(name, host) for host in hosts for name in known)


def is_alias(name: str, host: str) -> bool:
    """Whether `name` can be this host's, on any network: node1, node1.cluster, node1-ib, node1i; never node11."""
    if same_host(name, host):
        return True
    if is_address(name) or is_address(host):
        return False
    a, b = name.partition(".")[0].lower(), host.partition(".")[0].lower()
    return a.startswith(b) and not a[len(b)].isdigit()


def is_address(name: str) -> bool:
    """Whether this is an IP address (4 or 6) rather than a name. No name server is asked."""
    return ":" in name or (name.count(".") == 3 and name.replace(".", "").isdigit())


def is_loopback(name: str) -> bool:
    """Whether the name or address can only mean the machine that reads it."""
    first = name.lower().partition(".")[0]
    return first in {"localhost", "127"} or name in {"::1", "::", "0.0.0.0"}  # noqa: S104  # compared with, never bound
