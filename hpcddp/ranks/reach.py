"""A site's recipe for the network that ranks meet on: what a host is called there, or which interface leads there.

A scheduler gives the names of hosts; on some machines these belong to a management network. The site's recipe reaches
the ranks as HPCDDP_HOST_SUFFIX (`i`: node1 is node1i there; with a leading dot it is a domain) and HPCDDP_INTERFACE.
"""

from __future__ import annotations

from hpcddp.errors import LaunchError
from hpcddp.record import TYPE_CHECKING
from hpcddp.schedulers.allocation import is_address, is_loopback

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

_MOST_WAITING = 4096  # connections that nobody has accepted; the kernel may allow fewer
SUFFIX, INTERFACE = "HPCDDP_HOST_SUFFIX", "HPCDDP_INTERFACE"


def reached_as(host: str, env: Mapping[str, str]) -> str:
    """The host's name on the network that ranks meet on; the name itself without a recipe, and where it has its suffix.

    Addresses and loopback names stay as they are. LaunchError on a suffix that no host name can end in.
    """
    suffix = env.get(SUFFIX, "")
    if not suffix or is_address(host) or is_loopback(host):
        return host
    plain = suffix.replace("-", "").replace(".", "")
    if not (plain.isascii() and plain.isalnum()) or ".." in suffix or suffix[0].isdigit():  # node1 + 0 is another host
        raise LaunchError(f"{SUFFIX}={suffix!r} cannot be the end of a host's name", f"unset {SUFFIX}")
    first, dot, domain = host.partition(".")
    # A short suffix says nothing by itself (the host `delphi` ends in an i): only after a number it is taken for one.
    named = first.endswith(suffix) and first.removesuffix(suffix)[-1:].isdigit()
    return host if named or dot + domain == suffix else first + suffix


def find_local_address(env: Mapping[str, str], hostname: str) -> str:
    """Find the address of this host for others: that of the recipe's interface, else its name on that network.

    LaunchError if HPCDDP_INTERFACE is none of this host's interfaces, or has no address.
    """
    wanted = env.get(INTERFACE, "")
    if not wanted:
        return reached_as(hostname, env)
    from hpcddp.ranks.interfaces import list_interfaces, usable_addresses

    found = list_interfaces()
    addresses = usable_addresses(found, wanted)
    if not addresses:
        others = ", ".join(dict.fromkeys(interface.name for interface in found if not interface.is_loopback))
        fault = "has no address" if any(i.name == wanted for i in found) else "is none of its interfaces"
        raise LaunchError(
            f"ranks are to meet on interface {wanted} ({INTERFACE}), which on {hostname} {fault} (it has {others})",
            "correct rendezvous: {interface: …} of the site, or unset HPCDDP_INTERFACE",
        )
    return addresses[0]


def list_addresses(env: Mapping[str, str], hostname: str) -> tuple[str, ...]:
    """List the addresses of this host for others: by the site's recipe first."""
    from hpcddp.ranks.interfaces import list_interfaces

    try:
        found = [find_local_address(env, hostname)]
    except LaunchError:
        found = []
    found += [one.address for one in list_interfaces() if one.is_up and one.is_global]
    return tuple(dict.fromkeys(found)) or ("127.0.0.1",)


def open_listener(port: int = 0) -> socket.socket:
    """Listen on this port, or one that the kernel chooses, on every address of this host, of IPv6 and IPv4."""
    import socket  # which `hpcddp exec` does without

    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=_MOST_WAITING, dualstack_ipv6=both)


def require_resolved(address: str, because: str, hostname: str) -> None:
    """LaunchError where the name of rank 0's host is unknown here, which torch would ask for until its timeout.

    A name server that does not answer says nothing about the name.
    """
    if address == "127.0.0.1":  # all ranks are here; importing socket would be a tenth of `hpcddp exec`
        return
    import socket

    try:
        # as bytes: for a str Python imports the rules of international names, which no host's name needs
        socket.getaddrinfo(address.encode() if address.isascii() else address, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in {socket.EAI_NONAME, socket.EAI_NODATA}:
            raise LaunchError(
                f"rank 0's host {address!r} ({because}) does not resolve on {hostname}: {error.strerror}",
                "give all ranks MASTER_ADDR=<name or address of rank 0's host that every node knows>",
            ) from error
