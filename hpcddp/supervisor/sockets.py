"""The sockets on which the ranks' companions call: on every address of this host, and what they say without waiting."""

from __future__ import annotations

import _socket
import os
from contextlib import suppress

from hpcddp.errors import LaunchError
from hpcddp.ranks.interfaces import list_interfaces
from hpcddp.ranks.reach import own_address
from hpcddp.record import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_MOST_WAITING = 4096  # connections; the kernel may allow fewer


def allow_more_files(most: int) -> int:
    """Let this process open so many files, one for each rank, as far as its hard limit goes; how many it could before.
    Nothing is changed where it can open as many."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return soft


def allow_files(most: int) -> None:
    """The limit of open files that a process started with."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def open_listener() -> _socket.socket:
    """On a port that the kernel chooses. It does not block."""
    has_ipv6 = _has_ipv6()
    listener = _socket.socket(_socket.AF_INET6 if has_ipv6 else _socket.AF_INET, _socket.SOCK_STREAM)
    if has_ipv6:
        listener.setsockopt(_socket.IPPROTO_IPV6, _socket.IPV6_V6ONLY, 0)
    listener.bind(("", 0))
    listener.listen(_MOST_WAITING)
    listener.setblocking(False)
    return listener


def accept(listener: _socket.socket) -> _socket.socket | None:
    """Who waits to be heard; None: nobody does. OSError if this process may open no more files."""
    try:
        number, _ = listener._accept()  # type: ignore[attr-defined]  # typeshed has it under socket alone
    except (BlockingIOError, ConnectionAbortedError):
        return None
    caller = _socket.socket(fileno=number)
    caller.setblocking(False)
    return caller


def receive(connection: _socket.socket) -> bytes | None:
    """What has come; empty: the other side has ended; None: nothing has."""
    try:
        return connection.recv(65536)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _has_ipv6() -> bool:
    with suppress(OSError):
        probe = _socket.socket(_socket.AF_INET6, _socket.SOCK_STREAM)
        probe.close()
        return True
    return False


def own_names(env: Mapping[str, str]) -> tuple[str, ...]:
    """What other hosts may call this one: by the site's recipe first."""
    found = list[str]()
    with suppress(LaunchError):
        found.append(own_address(env, os.uname().nodename))
    found += [one.address for one in list_interfaces() if one.is_up and one.is_global]
    return tuple(dict.fromkeys(found)) or ("127.0.0.1",)
