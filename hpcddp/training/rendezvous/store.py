"""The key-value store that the ranks share before there is a process group.

All ranks try the same list of ports (`ranks/ports.py`). If only rank 0 skipped a busy port, the others would wait at
the wrong one until their timeout. A nonce in the store distinguishes this job's store from that of another job on the
same port.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError

from hpcddp.errors import LaunchError
from hpcddp.training.rendezvous.quiet_lookup import without_lookup_warning
from hpcddp.training.rendezvous.roll_call import wait_until
from hpcddp.training.torch_compat import Store, TCPStore, greet_store, host_tcp_store

_ANSWER_TIMEOUT_S = 5.0
_NONCE_KEY = "hpcddp/nonce"


def host_store(
    ports: tuple[int, ...], world_size: int, nonce: str, timeout_s: float, listener: socket.socket | None = None
) -> TCPStore:
    """Rank 0's side: the store on the first free port. LaunchError if none is free, or if there is a rank 0 already.

    `listener` is a socket that listens on the only port already, so that no other program can take that port.
    """
    limit = timedelta(seconds=timeout_s)
    for port in ports:
        try:
            with without_lookup_warning():
                store = host_tcp_store(port, world_size, limit, listener)
        except DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise LaunchError(
                    f"rank 0 cannot listen on port {port}: {error}", "set MASTER_PORT to another port"
                ) from error
            if _has_nonce(_connect("localhost", port, _ANSWER_TIMEOUT_S), nonce):
                raise LaunchError(
                    f"two processes of this job say that they are rank 0 (the other one listens on port {port})",
                    "start the ranks with a launcher that numbers them; hpcddp env --explain",
                ) from error
            continue
        store.set(_NONCE_KEY, nonce)
        return store
    raise LaunchError(
        f"ports {', '.join(map(str, ports))} are all in use on {socket.gethostname()}", "set MASTER_PORT to a free port"
    )


def reach_store(
    address: str, ports: tuple[int, ...], nonce: str, timeout_s: float, askers: int | None = None
) -> TCPStore:
    """Every other rank's side: waits for the store of this job on any of the ports. `askers`: see `wait_until`."""
    found: list[TCPStore] = []

    def look() -> bool:
        for port in ports:
            store = _connect(address, port, timeout_s)
            if store is not None and _has_nonce(store, nonce):
                found.append(store)
                return True
        return False

    if not wait_until(look, timeout_s, askers):
        raise LaunchError(
            f"rank 0 was not found at {address}, ports {', '.join(map(str, ports))}, within {timeout_s:.0f} s",
            "check that rank 0 started (its log comes first), and that the nodes reach each other under this address",
        )
    return found[0]


def _connect(address: str, port: int, timeout_s: float) -> TCPStore | None:
    """A client of the store there, or None if there is none."""
    try:
        # TCPStore itself would retry a refused connection until its timeout, and never try the next port
        with socket.create_connection((address, port), timeout=_ANSWER_TIMEOUT_S) as connection:
            greet_store(connection)
    except socket.gaierror as error:
        raise LaunchError(
            f"the master address {address!r} does not resolve on {socket.gethostname()}: {error.strerror}",
            "set MASTER_ADDR to a name or address of rank 0's node that every node can resolve",
        ) from error
    except OSError:
        return None
    found: list[TCPStore] = []

    def connect() -> None:
        with suppress(DistNetworkError, DistStoreError):
            found.append(TCPStore(address, port, None, False, timedelta(seconds=timeout_s), wait_for_workers=False))

    # in a thread: a program that answered the greeting only would hold TCPStore without any limit (torch 2.15)
    attempt = threading.Thread(target=connect, daemon=True)
    with without_lookup_warning():
        attempt.start()
        attempt.join(_ANSWER_TIMEOUT_S)
    return found[0] if found else None


def _has_nonce(store: Store | None, nonce: str) -> bool:
    if store is None:
        return False
    try:
        return (
            wait_until(lambda: store.check([_NONCE_KEY]), _ANSWER_TIMEOUT_S) and store.get(_NONCE_KEY) == nonce.encode()
        )
    except (DistNetworkError, DistStoreError):
        return False
