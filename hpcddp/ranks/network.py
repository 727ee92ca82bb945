"""Which network interface gloo and NCCL should use, where they would choose wrongly by themselves.

gloo binds to the first address that the host name resolves to. On machines where that is a loopback address (Debian
writes 127.0.1.1 into /etc/hosts), or belongs to another network than the one on which the ranks reach each other, it
needs the name of the right one. NCCL goes by the interfaces' names. What a user or a site has set is never changed.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hpcddp.errors import LaunchError
from hpcddp.ranks.interfaces import Interface, address_toward, interface_of, list_interfaces
from hpcddp.ranks.reach import INTERFACE, reached_as


class Look(NamedTuple):
    """A host's view of its network: the address that gloo would bind to, and the interface to use."""

    hostname: str
    mine: str | None  # the address of this host's name, None if it has none here
    peer: str | None  # a host of another node, None if all ranks are here
    toward: str | None  # the interface on the route to the peer
    wanted: str  # the interface that the site names, or ""
    interfaces: tuple[Interface, ...]


def look_around(hostname: str, peer: str | None, env: Mapping[str, str]) -> Look:
    """Find how this host reaches another host of the launch, by the site's recipe (`ranks/reach.py`)."""
    interfaces = tuple(list_interfaces())
    address = address_toward(reached_as(peer, env)) if peer else None
    toward = interface_of(address, interfaces) if address and not _is_loopback(address) else None
    mine = next((a for a in _addresses(hostname) if _is_loopback(a) or interface_of(a, interfaces)), None)
    return Look(hostname, mine, peer, toward, env.get(INTERFACE, "") if peer else "", interfaces)


def choose_gloo_interface(look: Look) -> tuple[str, str] | None:
    """(interface, why) where gloo would choose another one, else None."""
    own = interface_of(look.mine, look.interfaces) if look.mine and not _is_loopback(look.mine) else None
    why = f"host name {look.hostname} resolves to {look.mine or 'no address of this host'}"
    if look.peer is None:
        loopback = next((i.name for i in look.interfaces if i.is_loopback), None)
        return (loopback, why) if own is None and loopback else None
    name = look.wanted or look.toward
    if name is None or name == own:
        return None
    if look.wanted:
        return name, f"{INTERFACE} names it"
    return name, why if own is None else f"{why} ({own}), and the way to {look.peer} is by {name}"


def choose_nccl_interface(look: Look) -> tuple[str, str] | None:
    """(value for NCCL_SOCKET_IFNAME, why) where NCCL would take an interface that does not lead to the peers, else
    None.

    An InfiniBand interface that NCCL finds by itself is left to it: it is faster than the one that host names belong
    to, and the latter would slow NCCL down.
    """
    name = look.wanted or look.toward
    first = nccl_choice(look.interfaces)
    if look.peer is None or name is None or name == first:
        return None
    if look.wanted:
        return f"={name}", f"{INTERFACE} names it"
    if first is not None and first.startswith("ib"):
        return None
    return f"={name}", f"NCCL would take {first or 'none'}, and the way to {look.peer} is by {name}"


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


def read_nccl_files(env: Mapping[str, str]) -> str:
    """NCCL_SOCKET_IFNAME as NCCL's configuration files have it, which yield to the environment; else "".

    (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html: NCCL_CONF_FILE or ~/.nccl.conf, /etc/nccl.conf)
    """
    own = env.get("NCCL_CONF_FILE") or os.path.join(env.get("HOME", ""), ".nccl.conf")
    for path in (own, "/etc/nccl.conf"):
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                rows = [line.partition("=") for line in file]
        except OSError:
            continue
        for name, _, value in rows:
            if name.strip() == "NCCL_SOCKET_IFNAME":
                return value.strip()
    return ""


def settle_interface(env: Mapping[str, str], backend: str, look: Look) -> tuple[tuple[str, str] | None, str]:
    """The (variable, value) to set for this backend, if one is needed; and a remark for people, or "".

    LaunchError on a GLOO_SOCKET_IFNAME that gloo cannot use.
    """
    if backend == "gloo":
        variable, given, choice = "GLOO_SOCKET_IFNAME", env.get("GLOO_SOCKET_IFNAME", ""), choose_gloo_interface(look)
        if given:
            check_gloo_interface(given, look.hostname, look.interfaces)
            return None, ""
    else:
        given = env.get("NCCL_SOCKET_IFNAME") or read_nccl_files(env)
        variable, choice = "NCCL_SOCKET_IFNAME", choose_nccl_interface(look)
        if given:
            return None, ""
    if choice is None:
        return None, ""
    on_one_host = look.peer is None  # the choice makes no difference to anyone
    return (variable, choice[0]), "" if on_one_host else f"{variable}={choice[0]}, since {choice[1]}"


def check_gloo_interface(value: str, hostname: str, interfaces: Sequence[Interface]) -> None:
    """LaunchError on a GLOO_SOCKET_IFNAME that gloo cannot use: it takes whole names, no `^` and no prefix."""
    names = list(dict.fromkeys(i.name for i in interfaces))
    for name in value.split(","):
        if name not in names:
            raise LaunchError(
                f"GLOO_SOCKET_IFNAME={value} names no interface of {hostname}: it has {', '.join(names)}",
                "unset GLOO_SOCKET_IFNAME, or give one name as it is (`^` and prefixes are for NCCL_SOCKET_IFNAME)",
            )


def _addresses(hostname: str) -> list[str]:
    try:
        found = socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(entry[4][0]).partition("%")[0] for entry in found]


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
