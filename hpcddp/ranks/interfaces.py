"""This host's network interfaces and their addresses, and the one on the route to another host.

From the kernel, by the standard library alone: SIOCGIFCONF (netdevice(7)) for IPv4 with secondary addresses,
/proc/net/if_inet6 for IPv6. No packet is sent.
"""

from __future__ import annotations

import array
import fcntl
import socket
import struct

from hpcddp.record import TYPE_CHECKING, Record

if TYPE_CHECKING:
    from collections.abc import Sequence

_SIOCGIFCONF, _SIOCGIFFLAGS = 0x8912, 0x8913  # linux/sockios.h
_IFREQ = 40  # sizeof(struct ifreq) on 64-bit Linux
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
    """Every (interface, address) of this host: IPv4 first, then IPv6, as getifaddrs(3) orders them."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        found = _list_ipv4(probe)
        for name, address, scope in _list_ipv6():
            flags = _flags(probe, name)
            found.append(_interface(name, address, flags, is_global=scope == _GLOBAL))
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
    """This host's address on the route to `host`, IPv4 before IPv6; None if there is no route.

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


def _list_ipv4(probe: socket.socket) -> list[Interface]:
    buffer = array.array("B", bytes(_IFREQ * 256))
    request = struct.pack("iP", len(buffer), buffer.buffer_info()[0])
    size = struct.unpack("iP", fcntl.ioctl(probe.fileno(), _SIOCGIFCONF, request))[0]
    answer = buffer.tobytes()[:size]
    found = []
    for at in range(0, size, _IFREQ):
        name = answer[at : at + 16].partition(b"\0")[0].decode(errors="replace").partition(":")[0]  # eth0:1 is an alias
        address = socket.inet_ntoa(answer[at + 20 : at + 24])
        found.append(_interface(name, address, _flags(probe, name), is_global=not address.startswith("127.")))
    return found


def _list_ipv6() -> list[tuple[str, str, int]]:
    """(interface, address, scope)."""
    try:
        with open("/proc/net/if_inet6", encoding="ascii") as file:
            rows = [line.split() for line in file]
    except OSError:  # a kernel without IPv6
        return []
    rows.sort(key=lambda row: (int(row[1], 16), int(row[3], 16)))
    return [(row[5], socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0])), int(row[3], 16)) for row in rows]


def _interface(name: str, address: str, flags: int, *, is_global: bool) -> Interface:
    is_up = flags & _UP != 0 and flags & _RUNNING != 0
    return Interface(name, address, is_up, flags & _LOOPBACK != 0, is_global and not flags & _LOOPBACK)


def _flags(probe: socket.socket, name: str) -> int:
    try:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFFLAGS, struct.pack("256s", name.encode()[:15]))
    except OSError:
        return 0
    return int(struct.unpack_from("H", answer, 16)[0])
