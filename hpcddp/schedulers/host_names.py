"""Whether two names mean one host, and which names are addresses. No name server is asked."""

from __future__ import annotations

from hpcddp.record import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


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
