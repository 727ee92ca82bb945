"""Ports that all ranks of a launch find for themselves, alike.

Deterministic, keyed by the launch; below 32768, where Linux' default range for outgoing connections begins (a port in
it may be taken by any connection at any moment), and above 10000. If one is busy, all ranks go on to the next of the
list together.
"""

from __future__ import annotations

from binascii import crc32

LOWEST, HIGHEST = 12000, 31999
DEFAULT_EPHEMERAL = (32768, 60999)
_MOST_TRIED = 2000  # whatever the count, so that fewer ports are the first of more


def port_candidates(key: str, count: int = 16, ephemeral: tuple[int, int] = DEFAULT_EPHEMERAL) -> tuple[int, ...]:
    """The first `count` ports for this key, all different, none in `ephemeral` (low, high). Empty if none is left."""
    low, high = ephemeral
    if low <= LOWEST and high >= HIGHEST:
        return ()
    ports: dict[int, None] = {}
    attempt = 0
    while len(ports) < count and attempt < _MOST_TRIED:
        port = LOWEST + crc32(f"{key}#{attempt}".encode(errors="surrogateescape")) % (HIGHEST - LOWEST + 1)
        attempt += 1
        if not low <= port <= high:
            ports[port] = None
    return tuple(ports)


def ephemeral_range() -> tuple[int, int]:
    """This machine's range for outgoing connections; Linux' default where it cannot be read."""
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
            low, high = file.read().split()
            return int(low), int(high)
    except (OSError, ValueError):
        return DEFAULT_EPHEMERAL
