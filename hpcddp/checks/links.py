"""Which hosts exchange data with which, in rounds; which host or link is slow by what they measured; and the exchange
of two hosts without a GPU, over plain TCP."""

from __future__ import annotations

import socket
import time
from statistics import median

from hpcddp.checks.environment import FAILED, Check
from hpcddp.record import TYPE_CHECKING, Record

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    Pair = tuple[str, str]

#: Up to so many hosts every pair is tried; of more each host twice.
ALL_PAIRS = 16
_SLOW = 1 / 2  # of the median
#: Over TCP a link has to be below both to be slow: above, the CPU's share makes most of the difference, and a cable at
#: fault falls back to a tenth.
_SLOW_TCP, _LEAST_TCP_GBPS = 1 / 5, 1.0
_LATE = 10.0  # times the median, and so many milliseconds


class LinkSpeed(Record):
    """What two hosts have measured. `gbps`: the slower of both directions. `error`: why nothing was."""

    gbps: float = 0.0
    ms: float = 0.0
    error: str = ""


def count_rounds(hosts: int) -> int:
    """How many rounds there are."""
    return 0 if hosts < 2 else (hosts - 1 + hosts % 2) if hosts <= ALL_PAIRS else 2


def plan_round(hosts: Sequence[str], number: int, found: Mapping[Pair, LinkSpeed]) -> list[Pair]:
    """The pairs of one round, which exchange side by side. Of few hosts all pairs come, one round after the other. Of
    many the second round pairs a slow host with a fast one, by what the first has found: the slow one is slow again."""
    if len(hosts) <= ALL_PAIRS:
        return _turn([*hosts], number)
    if number == 0:
        return list(zip(hosts[0::2], hosts[1::2], strict=False)) + ([(hosts[-1], hosts[0])] if len(hosts) % 2 else [])
    speed = {host: max((one.gbps for pair, one in found.items() if host in pair), default=0.0) for host in hosts}
    order = sorted(hosts, key=lambda host: (speed[host], hosts.index(host)))
    half = len(order) // 2
    slow, fast = order[:half], order[: half - 1 : -1]
    pairs = list(zip(slow, fast, strict=False))
    known = {frozenset(pair) for pair in found}
    for at, (one, its) in enumerate(pairs):  # nobody meets the same one again
        if {one, its} in known:
            others = [n for n, (a, b) in enumerate(pairs) if not {frozenset((one, b)), frozenset((a, its))} & known]
            if others:
                (a, b), to = pairs[others[0]], others[0]
                pairs[at], pairs[to] = (one, b), (a, its)
    return pairs + ([(order[half], order[-1])] if len(order) % 2 else [])


def _turn(hosts: list[str], number: int) -> list[Pair]:
    """One round of a tournament in which everybody meets everybody: the first stays, the others turn."""
    places = [*hosts, ""] if len(hosts) % 2 else hosts
    others = places[1:]
    turned = [places[0], *others[number % len(others) :], *others[: number % len(others)]] if others else places
    half = len(turned) // 2
    pairs = zip(turned[:half], reversed(turned[half:]), strict=True)
    return [(a, b) for a, b in pairs if a and b]


def find_usual(found: Mapping[Pair, LinkSpeed]) -> LinkSpeed:
    """The median of the hosts, each by the best of its links: a slow host makes all links of a small job's others slow,
    and none of their best."""
    hosts = {host for pair in found for host in pair}
    of_hosts = [[one for pair, one in found.items() if host in pair and not one.error] for host in hosts]
    known = [links for links in of_hosts if links]
    if not known:
        return LinkSpeed(error="no pair has exchanged anything")
    best = [(max(one.gbps for one in links), min(one.ms for one in links)) for links in known]
    return LinkSpeed(median(rate for rate, _ in best), median(ms for _, ms in best))


def find_slow(found: Mapping[Pair, LinkSpeed], *, by_tcp: bool) -> set[Pair]:
    """The pairs that have exchanged nothing, or far more slowly than the median."""
    usual = find_usual(found)
    least = min(usual.gbps * _SLOW_TCP, _LEAST_TCP_GBPS) if by_tcp else usual.gbps * _SLOW
    late = max(usual.ms * _LATE, _LATE)
    return {pair for pair, one in found.items() if one.error or one.gbps < least or one.ms > late}


def judge_links(found: Mapping[Pair, LinkSpeed], *, by_tcp: bool) -> Iterator[tuple[str, Check]]:
    """The slow hosts, and the slow links between hosts that are not slow themselves, each with what was measured. A
    host is slow if each of its links is, and the others are not slow without it; one of two hosts cannot be named."""
    slow = find_slow(found, by_tcp=by_tcp)
    median_one = find_usual(found)
    usual = median_one.error or f"the median is {median_one.gbps:.3g} Gb/s"
    hosts = {host for pair in found for host in pair}
    ill = set[str]()
    left = {*slow}
    for host in sorted(hosts, key=lambda name: (-sum(name in pair for pair in slow), name)):
        of_host = [pair for pair in found if host in pair]
        others = [pair for pair in found if host not in pair]
        if len(hosts) > 2 and of_host and left >= {*of_host} and not {*others} <= slow:
            ill.add(host)
            left -= {*of_host}
            worst = min(of_host, key=lambda pair: found[pair].gbps)
            told = f"all {len(of_host)} of its links are slow: {_say(worst, found[worst])}, and {usual}"
            yield host, Check("slow host", told, "leave the node out; tell the site", FAILED)
    for pair in sorted(left):
        yield (
            pair[1],
            Check("slow link", f"{_say(pair, found[pair])}; {usual}", "tell the site, with both names", FAILED),
        )


def _say(pair: Pair, one: LinkSpeed) -> str:
    name = " with ".join(pair)
    return f"{name}: {one.error}" if one.error else f"{name} {one.gbps:.3g} Gb/s, {one.ms:.3g} ms"


# The exchange over TCP, in both directions one after the other, each on a connection of its own. It takes a time and
# no number of bytes, so that a slow link costs no more than a fast one.

_PINGS, _SEND_S, _RECEIVE_S, _CHUNK = 20, 0.25, 1.0, 1 << 18


def serve_exchange(listener: socket.socket, limit_s: float) -> None:
    """The answering side. OSError if nobody calls in time."""
    listener.settimeout(limit_s)
    caller, _ = listener.accept()
    with caller:
        caller.settimeout(limit_s)
        for _ in range(_PINGS):
            caller.sendall(caller.recv(1))
        caller.sendall(f"{_receive(caller):.6f}\n".encode())
    caller, _ = listener.accept()
    with caller:
        caller.settimeout(limit_s)
        _send(caller)


def run_exchange(address: str, port: int, limit_s: float) -> LinkSpeed:
    """The calling side: what was measured."""
    try:
        with socket.create_connection((address, port), limit_s) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            times = []
            for _ in range(_PINGS):
                began = time.perf_counter()
                connection.sendall(b".")
                if not connection.recv(1):
                    return LinkSpeed(error="the connection was closed")
                times.append(time.perf_counter() - began)
            _send(connection)
            connection.settimeout(limit_s)
            there = float(connection.makefile("rb").readline())
        with socket.create_connection((address, port), limit_s) as connection:
            back = _receive(connection)
    except (OSError, ValueError) as error:
        said = "no answer" if isinstance(error, TimeoutError) else getattr(error, "strerror", None) or str(error)
        return LinkSpeed(error=said.lower())
    rate = min(there, back)
    return LinkSpeed(rate, min(times) * 1000, "" if rate else "nothing came in a second")


def _send(connection: socket.socket) -> None:
    block, end = bytes(_CHUNK), time.monotonic() + _SEND_S
    connection.settimeout(_SEND_S)
    try:
        while time.monotonic() < end:
            connection.send(block)
        connection.shutdown(socket.SHUT_WR)
    except OSError:
        return  # the other side has seen enough


def _receive(connection: socket.socket) -> float:
    """Gb/s of what comes, until its end or a second. The first piece begins the time, and does not count."""
    end, first, last, count = time.perf_counter() + _RECEIVE_S, 0.0, 0.0, 0
    connection.settimeout(_RECEIVE_S)
    while time.perf_counter() < end:
        try:
            data = connection.recv(_CHUNK)
        except OSError:
            break
        if not data:
            break
        last = time.perf_counter()
        count += len(data) if first else 0
        first = first or last
    return count * 8e-9 / (last - first) if last > first else 0.0
