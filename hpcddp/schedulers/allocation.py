"""Allocation of one job: which hosts, with how many slots each. Never a source of ranks.

Slots are places, not processes: `mpirun -n 1` in an allocation of 4 slots is one rank.
"""

from __future__ import annotations

import os

from hpcddp.errors import LaunchError
from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.units import read_number, shorten

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    Hosts = tuple[tuple[str, int], ...]
    #: None where they cannot be read here; and the variable or file that they came from, "" without hosts
    HostsFound = tuple[Hosts | None, str]

_MOST = 1 << 20  # hosts: a garbled list must not take a login node's memory


# ---- names of hosts: no name server is asked


def same_host(a: str, b: str) -> bool:
    """Whether two names mean one host by their first labels; addresses are compared whole.

    A scheduler's file says `node001.hpc.test` where `hostname` says `node001`.
    """
    a, b = a.lower().rstrip("."), b.lower().rstrip(".")
    return a == b or (not is_address(a) and not is_address(b) and a.partition(".")[0] == b.partition(".")[0])


def is_this_host(name: str) -> bool:
    return same_host(name, os.uname().nodename)


def includes_host(hosts: Sequence[str], names: Iterable[str]) -> bool:
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
    """Whether this is an IP address (4 or 6) rather than a name."""
    return ":" in name or (name.count(".") == 3 and name.replace(".", "").isdigit())


def is_loopback(name: str) -> bool:
    """Whether the name or address can only mean the machine that reads it."""
    first = name.lower().partition(".")[0]
    return first in {"localhost", "127"} or name in {"::1", "::", "0.0.0.0"}  # noqa: S104  # compared with, never bound


# ---- the hosts of a job


class Allocation(Record):
    """A job. `hosts`: (name, slots) in the scheduler's order, each host once; None where they cannot be read here."""

    scheduler: str  # the name of its row
    job_id: str  # of `CurrentJob`
    hosts: Hosts | None
    source: str  # variable or file that the hosts came from, "" without hosts
    interactive: bool = False

    @property
    def slots(self) -> int | None:
        """Slots on all hosts; None if the hosts are unknown."""
        return None if self.hosts is None else sum(n for _, n in self.hosts)


def read_nodefile(path: str) -> Hosts:
    """Hosts and slots of a file with one host per line, or `host N`, `host slots=N`, `host:N`.

    PBS writes a host once per slot. It may come back later in the file, and be fully qualified in one line and short
    in another (both seen in OpenPBS 23.06): lines of one first label are one host. LaunchError if the file cannot be
    read or is empty.
    """
    lines = read_word_lines(path)
    if lines is None:
        raise LaunchError(f"the node file {path} cannot be read", f"ls -l {path}")
    hosts = count_hosts(lines, path)
    if not hosts:
        raise LaunchError(
            f"the node file {path} is empty",
            "write one host per line; if the scheduler wrote it, ask for 1 slot or more",
        )
    return hosts


def read_named_file(env: Mapping[str, str], variable: str, nodefile: str | None) -> HostsFound:
    """Hosts and their source: from the caller's file, else from the file that `variable` names, else None."""
    if nodefile is not None:
        return read_nodefile(nodefile), nodefile
    lines = read_word_lines(env[variable]) if env.get(variable) else None
    return (None, "") if lines is None else (count_hosts(lines), f"{variable} ({env[variable]})")


def count_hosts(lines: list[list[str]], path: str = "") -> Hosts:
    """Hosts and slots of lines of words. A second word that is no count is refused in a file that a person names
    (`path`); in a scheduler's own file it is something else of that scheduler, and the line is one slot."""
    counts: dict[str, int] = {}
    names: dict[str, str] = {}  # first label -> the name it first had
    for words in lines:
        name, _, count = words[0].partition(":") if words[0].count(":") == 1 else (words[0], "", "")
        count = count or (words[1].removeprefix("slots=") if len(words) > 1 else "1")
        name = names.setdefault(name.lower() if is_address(name) else name.partition(".")[0].lower(), name)
        slots = read_number(count)
        if slots is None and path:
            raise LaunchError(f"{path}: {' '.join(words)!r} does not say how many slots", "write: host slots=4")
        counts[name] = counts.get(name, 0) + (1 if slots is None else slots)
    return tuple(counts.items())


def read_word_lines(path: str) -> list[list[str]] | None:
    """The words of each line, without comments and empty lines; None if the file cannot be read."""
    try:
        with open(path, encoding="utf-8") as file:
            return [words for line in file if (words := line.partition("#")[0].split())]
    except (OSError, UnicodeDecodeError):
        return None


# ---- Slurm's compressed forms: host lists (`node[001-003,7],login1`) and run lengths (`2(x3),1`)


def expand_nodelist(text: str, where: str = "nodelist") -> list[str]:
    """The hosts of a Slurm host list, in its order. `where` names the source in the error.

    Zero padding is kept (`n[08-11]` is n08 … n11), brackets may be several (`rack[1-2]n[1-2]`: the last turns
    fastest) and be followed by a suffix (`n[1-2]-ib`). LaunchError on a form that is not one of these.
    """
    hosts: list[str] = []
    for name in _split_names(text, where):
        grown, rest = [""], name
        while rest:
            before, opened, rest = rest.partition("[")
            inside, closed, rest = rest.partition("]") if opened else ("", "", "")
            numbers = _expand_numbers(inside, text, where) if closed else [""]
            if "]" in before or (opened and not closed) or len(grown) * len(numbers) > _MOST:
                raise _bad(text, where)
            grown = [start + before + number for start in grown for number in numbers]
        hosts += grown
    return hosts


def _split_names(text: str, where: str) -> list[str]:
    names: list[str] = []
    pieces: list[str] = []
    depth = 0
    for piece in text.strip().split(","):
        pieces.append(piece)
        depth += piece.count("[") - piece.count("]")
        if depth == 0:
            names.append(",".join(pieces))
            pieces = []
    if pieces or "" in names or len(text.split()) != 1:
        raise _bad(text, where)
    return names


def _expand_numbers(inside: str, text: str, where: str) -> list[str]:
    numbers: list[str] = []
    for part in inside.split(","):
        low, dash, high = part.partition("-")
        first, last = read_number(low), read_number(high if dash else low)
        if first is None or last is None or not first <= last < first + _MOST:
            raise _bad(text, where)
        numbers += [f"{n:0{len(low)}d}" for n in range(first, last + 1)]
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
