"""What a rank and the process beside it tell each other: how far the rank is, and when the job ends.

A page of memory on their host, which `hpcddp exec` makes and names in HPCDDP_HEARTBEAT. hpcddp's runtime writes it; any
other program may touch it (`touch "$HPCDDP_HEARTBEAT"`) to say that it gets on. `hpcddp exec` tells the job's
supervisor, whose address is a file in the attempt's folder.
"""

from __future__ import annotations

import os
from contextlib import suppress

from hpcddp.record import TYPE_CHECKING, Record

if TYPE_CHECKING:
    from hpcddp.runs.folder import AttemptFolder

VARIABLE = "HPCDDP_HEARTBEAT"
#: The rank of a process whose environment does not say which one it is.
NO_RANK = -1
#: Bytes of the numbers that a rank writes at the page's begin.
_COUNTS = 84
#: Where in the page the job's end, the lease and the place stand; the most bytes of the place.
_END_AT, _LEASE_AT, _PLACE_AT, _PLACE = 128, 192, 256, 200


class Beat(Record):
    """`step`: of the optimizer, over all attempts. `moves` grows while the rank's main thread gets on, `looks` while
    the process runs at all; 0: the program does not say it, or says no more. `touched`: when the page was last written,
    in ns. `uses` grows while the main thread stands and is at work all the same: it uses the processor, or its process
    is at a checkpoint's files."""

    step: int = 0
    moves: int = 0
    looks: int = 0
    touched: int = 0
    uses: int = 0


class Page:
    """The page, by its open file."""

    def __init__(self, file: int) -> None:
        self.file = file

    @property
    def path(self) -> str:
        """How other processes of this host open it."""
        return f"/proc/{os.getpid()}/fd/{self.file}"

    def write(self, step: int, moves: int, looks: int, uses: int = 0) -> None:
        """The rank's part."""
        os.pwrite(self.file, f"{step:020d} {moves:020d} {looks:020d} {uses:020d}\n".encode(), 0)

    def read(self) -> Beat:
        """What the rank wrote last."""
        written = os.pread(self.file, _COUNTS, 0).replace(b"\0", b" ").split()
        touched = os.fstat(self.file).st_mtime_ns
        if len(written) != 4 or not all(map(bytes.isdigit, written)):  # a program may write there, too
            return Beat(touched=touched)
        step, moves, looks, uses = map(int, written)
        return Beat(step, moves, looks, touched, uses)

    def write_place(self, text: str) -> None:
        """Where the rank's main thread stands; empty: it gets on."""
        os.pwrite(self.file, text.encode(errors="replace")[:_PLACE].ljust(_PLACE, b"\0"), _PLACE_AT)

    def read_place(self) -> str:
        """What was written last."""
        return os.pread(self.file, _PLACE, _PLACE_AT).strip(b"\0").decode(errors="replace")

    def write_end(self, at: float) -> None:
        """When the job ends, in seconds since 1970: it may have been given more time, or less."""
        self._write_time(at, _END_AT)

    def read_end(self) -> float | None:
        """None: nothing was said since the start."""
        return self._read_time(_END_AT)

    def write_lease(self, until: float) -> None:
        """By when the rank ends itself, on the monotonic clock of this host, if no later time is written by then."""
        self._write_time(until, _LEASE_AT)

    def read_lease(self) -> float | None:
        """None: it may live for ever."""
        return self._read_time(_LEASE_AT)

    def _write_time(self, at: float, where: int) -> None:
        """By the process beside the rank: the page is as old as before, for the rank has said nothing."""
        touched = os.fstat(self.file)
        os.pwrite(self.file, f"{at:020.1f}\n".encode(), where)
        os.utime(self.file, ns=(touched.st_atime_ns, touched.st_mtime_ns))

    def _read_time(self, where: int) -> float | None:
        written = os.pread(self.file, 21, where).strip(b"\n\0")
        return float(written) if written.replace(b".", b"").isdigit() else None


def make_page() -> Page | None:
    """A new page; None on a kernel that has none."""
    with suppress(OSError, AttributeError):
        return Page(os.memfd_create("hpcddp-heartbeat"))
    return None


def open_page(path: str | None) -> Page | None:
    """The page that the process beside this rank made; None if there is none to be seen, as in some containers."""
    if path:
        with suppress(OSError):
            return Page(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    return None


class Supervised(Record):
    """Where the supervisor of an attempt listens. `hosts`: names and addresses of its host. `key`: what shows that a
    caller may read this file. `every_s`: how often it wants to hear. `lease_s`: a rank whose supervisor is not heard
    for so long ends itself, since another attempt may have begun; 0: never.
    """

    port: int
    key: str
    every_s: float
    lease_s: float
    hosts: tuple[str, ...]


def write_supervised(attempt: AttemptFolder, told: Supervised) -> None:
    """For this user's ranks alone. OSError if the folder cannot be written."""
    lines = [str(told.port), told.key, str(told.every_s), str(told.lease_s), *told.hosts]
    file = os.open(_path(attempt), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(file, "".join(f"{line}\n" for line in lines).encode())
    finally:
        os.close(file)


def read_supervised(attempt: AttemptFolder) -> Supervised | None:
    """None where no supervisor listens, or not to this hpcddp."""
    with suppress(OSError, ValueError), open(_path(attempt), encoding="utf-8") as file:
        port, key, every_s, lease_s, *hosts = file.read().split()
        return Supervised(int(port), key, float(every_s), float(lease_s), tuple(hosts))
    return None


def _path(attempt: AttemptFolder) -> str:
    return os.path.join(attempt.path, "supervisor")
