"""PMI-1 in pure Python: put and get over the socket that Hydra gives each rank, to tell all of them where rank 0 is.

Verified with MPICH 5.0.2 and Intel MPI 2021.18. A message is a line of `key=value` words; words are read by name, for
their order and number differ between the two.

The trap: whoever says `init` becomes a client, and Hydra takes its exit without `finalize` for a crash and kills the
other ranks, often with exit status 0. So `finalize` is sent once, when the process ends. Not earlier, because MPI_Init
would then find the connection closed; and not at all if MPI was initialised here, because MPI finalizes it itself.
"""

from __future__ import annotations

import atexit
import os
import select
import sys

from hpcddp.errors import LaunchError
from hpcddp.ranks.resolve import pmi_socket_is_open
from hpcddp.record import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_MAX_VALUE = 256  # below vallen_max of both (1024 and 4096)


class PmiClient:
    """This process's connection to its launcher's key-value store. One per process: get it with `connect`."""

    def __init__(self, fd: int, timeout_s: float) -> None:
        self._fd = fd
        self._timeout_s = timeout_s
        self._pid = os.getpid()
        self._ask("init pmi_version=1 pmi_subversion=1", "response_to_init")
        self._open = True
        self._space = self._ask("get_my_kvsname", "my_kvsname")["kvsname"]

    def put(self, key: str, value: str) -> None:
        """Store a value; others see it after `barrier`. ValueError on blanks or a length that PMI cannot carry."""
        if not value or len(value) > _MAX_VALUE or any(c.isspace() for c in key + value):
            raise ValueError(f"PMI carries no value like {value[:40]!r}")
        self._ask(f"put kvsname={self._space} key={key} value={value}", "put_result")

    def barrier(self) -> None:
        """Wait until every rank of the launch is here. LaunchError after the time limit."""
        self._ask("barrier_in", "barrier_out")

    def get(self, key: str) -> str:
        """The value of a key. LaunchError if nobody has put it."""
        return self._ask(f"get kvsname={self._space} key={key}", "get_result")["value"]

    def finalize(self) -> None:
        """Take leave of the launcher, once; nothing can be asked afterwards. Runs by itself when the process ends."""
        if not self._open or self._pid != os.getpid():  # a forked child shares the socket, not the membership
            return
        self._open = False
        if not _mpi_will_finalize():
            self._ask("finalize", "finalize_ack")

    def _ask(self, request: str, answer: str) -> dict[str, str]:
        what = request.partition(" ")[0]
        try:
            os.write(self._fd, f"cmd={request}\n".encode())
            line = self._read_line(what)
        except OSError as error:
            raise LaunchError(f"the launcher's PMI socket failed at {what}: {error.strerror}", _HINT) from error
        words = dict(word.partition("=")[::2] for word in line.split())
        if words.get("cmd") != answer or words.get("rc", "0") != "0":
            raise LaunchError(f"the launcher answered PMI {what} with {line!r}", _HINT)
        return words

    def _read_line(self, what: str) -> str:
        data = b""
        while not data.endswith(b"\n"):
            if not select.select([self._fd], [], [], self._timeout_s)[0]:
                raise LaunchError(f"the launcher did not answer PMI {what} within {self._timeout_s:g} s", _HINT)
            part = os.read(self._fd, 4096)
            if not part:
                raise LaunchError(f"the launcher closed its PMI socket at {what}", _HINT)
            data += part
        return data.decode(errors="replace").strip()


_HINT = "see whether all ranks have started; or export MASTER_ADDR to all ranks"
_client: PmiClient | None = None


def connect(env: Mapping[str, str], timeout_s: float = 120.0) -> PmiClient | None:
    """Get this process's PMI connection, made at the first call; None if its launcher gives none.

    Every rank of the launch must come here, or none: `barrier` waits for all. LaunchError if the launcher does not
    speak PMI-1.
    """
    global _client  # the launcher knows this process once, whoever asks
    if _client is None and pmi_socket_is_open(env):
        _client = PmiClient(int(env["PMI_FD"]), timeout_s)
        atexit.register(_client.finalize)
    return _client


def share_from_rank_0(client: PmiClient, rank: int, key: str, value: str) -> str:
    """Return rank 0's `value` on every rank. All ranks must call it."""
    if rank == 0:
        client.put(key, value)
    client.barrier()
    return client.get(key)


def _mpi_will_finalize() -> bool:
    # through mpi4py, without importing it. Open MPI speaks PMIx, and knows nothing of this connection
    module = sys.modules.get("mpi4py.MPI")
    return module is not None and bool(module.Is_initialized()) and "Open MPI" not in module.Get_library_version()
