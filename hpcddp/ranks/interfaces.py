"""This host's network interfaces and their addresses, and the one on the route to another host.

From the kernel, by the standard library alone: SIOCGIFADDR (netdevice(7)) for each interface's first IPv4 address,
/proc/net/if_inet6 for IPv6. No packet is sent.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from contextlib import suppress

from hpcddp.record import TYPE_CHECKING, Record

if TYPE_CHECKING:
    from collections.abc import Sequence

_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915  # linux/sockios.h
_UP, _LOOPBACK, _RUNNING = 0x1, 0x8, 0x40  # linux/if.h
_GLOBAL = 0x00  # scope in /proc/net/if_inet6; 0x20 is link-local, which a name alone cannot reach


class Interface(Record):
    """An interface with one of its addresses; it comes once for each. `is_up`: also with a carrier."""

    name: str
    address: str
    is_up: bool
    is_loopback: bool
    is_global: bool = True


def list_interfaces() -> list[Interface]:
    """Every (interface, address) of this host: IPv4 first, then IPv6."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answers = {name: _ask_kernel(probe, name, _SIOCGIFFLAGS) for _, name in socket.if_nameindex()}
        ipv4 = {name: answer for name in answers if (answer := _ask_kernel(probe, name, _SIOCGIFADDR))}
    addresses = [(name, socket.inet_ntoa(answer[20:24]), True) for name, answer in ipv4.items()]
    found = []
    for name, address, is_global in (*addresses, *_list_ipv6()):
        answer = answers.get(name, b"")
        flag = int(struct.unpack_from("H", answer, 16)[0]) if answer else 0
        is_up, is_loopback = flag & _UP != 0 and flag & _RUNNING != 0, flag & _LOOPBACK != 0
        found.append(Interface(name, address, is_up, is_loopback, is_global and not is_loopback))
    return found


def interface_of(address: str, among: Sequence[Interface] | None = None) -> str | None:
    """The name of the interface that holds this address, or None."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    address = socket.inet_ntop(family, socket.inet_pton(family, address.partition("%")[0]))
    return next((i.name for i in (list_interfaces() if among is None else among) if i.address == address), None)


def usable_addresses(interfaces: Sequence[Interface], name: str) -> list[str]:
    """The addresses of an interface under which another host can call it."""
    return [i.address for i in interfaces if i.name == name and i.is_global]


def address_toward(host: str) -> str | None:
    """Find this host's address on the route to `host`, IPv4 before IPv6; None if there is no route.

    (Connecting a UDP socket only asks the routing table.)
    """
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, where in sorted(found, key=lambda entry: entry[0] != socket.AF_INET):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(where)
                return str(probe.getsockname()[0]).partition("%")[0]
        except OSError:
            continue
    return None


def _list_ipv6() -> list[tuple[str, str, bool]]:
    """(interface, address, whether another host reaches it by a name alone)."""
    try:
        with open("/proc/net/if_inet6", encoding="ascii") as file:
            rows = [line.split() for line in file]
    except OSError:  # a kernel without IPv6
        return []
    rows.sort(key=lambda row: (int(row[1], 16), int(row[3], 16)))
    return [
        (row[5], socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0])), int(row[3], 16) == _GLOBAL) for row in rows
    ]


def _ask_kernel(probe: socket.socket, name: str, question: int) -> bytes:
    """The kernel's answer about an interface; empty where it has none, as on the address of one without IPv4."""
    with suppress(OSError):
        return fcntl.ioctl(probe.fileno(), question, struct.pack("256s", name.encode()[:15]))
    return b""
