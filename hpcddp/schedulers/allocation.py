"""What a scheduler gave to one job: which hosts, with how many slots each. Never a source of ranks.

Slots are places, not processes: `mpirun -n 1` in an allocation of 4 slots is one rank.
"""

from __future__ import annotations

from hpcddp.errors import LaunchError
from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.schedulers.host_names import is_address
from hpcddp.units import read_number

if TYPE_CHECKING:
    from collections.abc import Mapping

    Hosts = tuple[tuple[str, int], ...]
    #: None where they cannot be read here; and the variable or file that they came from, "" without hosts
    HostsFound = tuple[Hosts | None, str]


class Allocation(Record):
    """One job. `hosts`: (name, slots) in the scheduler's order, each host once; None where they cannot be read here."""

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
    lines = read_lines(path)
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
    lines = read_lines(env[variable]) if env.get(variable) else None
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


def read_lines(path: str) -> list[list[str]] | None:
    """The words of each line, without comments and empty lines; None if the file cannot be read."""
    try:
        with open(path, encoding="utf-8") as file:
            return [words for line in file if (words := line.partition("#")[0].split())]
    except (OSError, UnicodeDecodeError):
        return None
