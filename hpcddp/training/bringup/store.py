"""The key-value store that ranks meet in before there is a process group.

All ranks walk the same list of ports (`ranks/ports.py`). If rank 0 alone moved on from a busy port, the others would
wait for it at the wrong one until their timeout. A nonce in the store tells this job's store from that of another job
that happens to listen on the same port.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError, TCPStore  # type: ignore[attr-defined]  # torch re-exports it without saying so
from torch.distributed.distributed_c10d import Store

from hpcddp.errors import LaunchError
from hpcddp.training.bringup.roll_call import wait_until

_ANSWER_TIMEOUT_S = 5.0
_NONCE_KEY = "hpcddp/nonce"


def host_store(
    ports: tuple[int, ...], world_size: int, nonce: str, timeout_s: float, listener: socket.socket | None = None
) -> TCPStore:
    """Rank 0's side: the store on the first free port. LaunchError if none is, or if there is a rank 0 already.

    With `listener`, a socket that listens on the only port already, nobody can have taken it in between.
    """
    limit = timedelta(seconds=timeout_s)
    for port in ports:
        held = _hand_over(listener)
        try:
            store = TCPStore("localhost", port, world_size, True, limit, wait_for_workers=False, **held)
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


def _hand_over(listener: socket.socket | None) -> dict[str, Any]:
    """The argument with which TCPStore takes an open socket; it closes it. A torch without it gets the free port."""
    if listener is None:
        return {}
    if "master_listen_fd" in (TCPStore.__init__.__doc__ or ""):
        return {"master_listen_fd": listener.detach()}
    listener.close()
    return {}


def reach_store(address: str, ports: tuple[int, ...], nonce: str, timeout_s: float) -> TCPStore:
    """Every other rank's side: the store of this job, wherever in the list it is, waiting for it to appear."""
    found: list[TCPStore] = []

    def look() -> bool:
        stores = (_connect(address, port, timeout_s) for port in ports)
        found.extend(store for store in stores if store is not None and _has_nonce(store, nonce))
        return bool(found)

    if not wait_until(look, timeout_s):
        raise LaunchError(
            f"rank 0 was not found at {address}, ports {', '.join(map(str, ports))}, within {timeout_s:.0f} s",
            "check that rank 0 started (its log comes first), and that the nodes reach each other under this address",
        )
    return found[0]


def _connect(address: str, port: int, timeout_s: float) -> TCPStore | None:
    """A client of the store there, or None if nothing there is one."""
    try:
        # TCPStore itself would retry a refused connection until its timeout, and never look at the next port
        socket.create_connection((address, port), timeout=_ANSWER_TIMEOUT_S).close()
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

    # in a thread: a listener that is no store never answers, and TCPStore waits for it without any limit (torch 2.15)
    attempt = threading.Thread(target=connect, daemon=True)
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
