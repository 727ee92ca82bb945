"""Which network interface gloo and NCCL should use, where they would choose wrongly by themselves.

gloo binds to the first address that the host name resolves to. On machines where that is a loopback address (Debian
writes 127.0.1.1 into /etc/hosts), or belongs to another network than the one on which the ranks reach each other, it
needs the name of the right one. NCCL goes by the interfaces' names. What a user or a site has set is never changed.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, MutableMapping, Sequence
from typing import NamedTuple

from hpcddp.errors import LaunchError
from hpcddp.ranks.interfaces import Interface, address_toward, interface_of, list_interfaces
from hpcddp.ranks.reach import INTERFACE, reached_as
from hpcddp.schedulers.allocation import is_loopback


class HostNetwork(NamedTuple):
    """A host's view of its network: the address that gloo would bind to, and the interface to use."""

    hostname: str
    mine: str | None  # the address of this host's name, None if it has none here
    peer: str | None  # a host of another node, None if all ranks are here
    toward: str | None  # the interface on the route to the peer
    wanted: str  # the interface that the site names, or ""
    interfaces: tuple[Interface, ...]


def describe_network(hostname: str, peer: str | None, env: Mapping[str, str]) -> HostNetwork:
    """Find how this host reaches another host of the launch, by the site's recipe (`ranks/reach.py`)."""
    interfaces = tuple(list_interfaces())
    address = address_toward(reached_as(peer, env)) if peer else None
    toward = interface_of(address, interfaces) if address and not is_loopback(address) else None
    mine = next((a for a in _addresses(hostname) if is_loopback(a) or interface_of(a, interfaces)), None)
    return HostNetwork(hostname, mine, peer, toward, env.get(INTERFACE, "") if peer else "", interfaces)


def choose_gloo_interface(network: HostNetwork) -> tuple[str, str] | None:
    """(interface, why) where gloo would choose another one, else None."""
    mine = network.mine
    by_name = interface_of(mine, network.interfaces) if mine and not is_loopback(mine) else None
    why = f"host name {network.hostname} resolves to {mine or 'no address of this host'}"
    if network.peer is None:
        loopback = next((i.name for i in network.interfaces if i.is_loopback), None)
        return (loopback, why) if by_name is None and loopback else None
    name = network.wanted or network.toward
    if name is None or name == by_name:
        return None
    if network.wanted:
        return name, f"{INTERFACE} names it"
    return name, why if by_name is None else f"{why} ({by_name}), and the way to {network.peer} is by {name}"


def choose_nccl_interface(network: HostNetwork) -> tuple[str, str] | None:
    """(value for NCCL_SOCKET_IFNAME, why) where NCCL would take an interface that does not lead to the peers, else
    None.

    An InfiniBand interface that NCCL finds by itself is left to it: it is faster than the one that host names belong
    to, and the latter would slow NCCL down.
    """
    name = network.wanted or network.toward
    first = nccl_choice(network.interfaces)
    if network.peer is None or name is None or name == first:
        return None
    if network.wanted:
        return f"={name}", f"{INTERFACE} names it"
    if first is not None and first.startswith("ib"):
        return None
    return f"={name}", f"NCCL would take {first or 'none'}, and the way to {network.peer} is by {name}"


def nccl_choice(interfaces: Sequence[Interface]) -> str | None:
    """The first interface in NCCL's own order: ib*, then any but docker*, lo*, virbr*, then docker*, lo*, virbr*.

    (NCCL 2.30, src/misc/socket.cc, ncclFindInterfaces. It skips what has no carrier, and the IPv6 loopback address.)
    """
    names = [i.name for i in interfaces if i.is_up and not (i.is_loopback and ":" in i.address)]
    for prefix in ("ib", "", "docker", "lo", "virbr"):
        for name in names:
            if name.startswith(prefix) if prefix else not name.startswith(("docker", "lo", "virbr")):
                return name
    return None


def set_interface(env: MutableMapping[str, str], backend: str, hostname: str, peer: str | None) -> str:
    """Set the interface for this backend where it would take one that does not lead to `peer`, a host of another node
    (None: all ranks are on this one). A remark for people, or "".

    LaunchError on a GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME that leaves no interface of this host.
    """
    network = describe_network(hostname, peer, env)
    variable = "GLOO_SOCKET_IFNAME" if backend == "gloo" else "NCCL_SOCKET_IFNAME"
    if env.get(variable):
        check_interface(variable, env[variable], network)
        return ""
    choice = choose_gloo_interface(network) if backend == "gloo" else choose_nccl_interface(network)
    if choice is None:
        return ""
    env[variable] = choice[0]
    return f"{variable}={choice[0]}, since {choice[1]}" if peer is not None else ""


def check_interface(variable: str, value: str, network: HostNetwork) -> None:
    """LaunchError on a value that leaves no interface of this host.

    gloo takes whole names. For NCCL names are prefixes, `=` makes them whole, and `^` excludes.
    """
    names = list(dict.fromkeys(i.name for i in network.interfaces))
    words = value.lstrip("^=").split(",")
    if variable == "GLOO_SOCKET_IFNAME":
        is_right = all(word in names for word in value.split(","))
    elif value.lstrip("^").startswith("="):
        is_right = any((name in words) != value.startswith("^") for name in names)
    else:
        is_right = any(name.startswith(tuple(words)) != value.startswith("^") for name in names)
    if not is_right:
        raise LaunchError(
            f"{variable}={value} names no interface of {network.hostname}: it has {', '.join(names)}",
            f"unset {variable}, or give one name as it is (`^` and prefixes are for NCCL_SOCKET_IFNAME)",
        )


def _addresses(hostname: str) -> list[str]:
    try:
        found = socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(entry[4][0]).partition("%")[0] for entry in found]
