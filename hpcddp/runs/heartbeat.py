"""The page of memory that a rank and its agent share on their host: how far the rank is, and when the job ends.

`hpcddp exec` makes it and names it in HPCDDP_HEARTBEAT. hpcddp's runtime writes it; any other program may touch it to
show that it gets on.
"""

from __future__ import annotations

import os
from contextlib import suppress

from hpcddp.guard.hpcddp_stand import MAY_WAIT, NO_WAIT, STAND, STAND_AT, WAITS
from hpcddp.record import Record
from hpcddp.runs.hang import Stand

HEARTBEAT_VARIABLE = "HPCDDP_HEARTBEAT"
#: The rank of a process whose environment does not say which one it is.
NO_RANK = -1
#: Bytes of the numbers that a rank writes at the page's begin.
_COUNTS = 84
#: Where in the page the job's end, the lease and the place stand; the most bytes of the place.
_END_AT, _LEASE_AT, _PLACE_AT, _PLACE = 128, 192, 256, 200


class Beat(Record):
    """How far a rank is."""

    step: int = 0  # of the optimizer, over all attempts
    moves: int = 0  # grows while the rank's main thread gets on
    looks: int = 0  # grows while the process runs at all; 0: the program does not report it, or no more
    touched: int = 0  # when the page was last written, in ns
    uses: int = 0  # grows while the main thread stands and works: its process computes or is at a checkpoint's files
    is_stopped: bool = False  # by a signal, as the agent sees


class PageEntry(Record):
    """An entry of `guard/hpcddp_stand.py`: the rank's number and process, where its main thread stands, and what that
    has done."""

    rank: int
    world_size: int
    process: int
    stacks: int  # the descriptor to which the process writes its stacks
    looks: int  # how often the rank has looked where its main thread stands; 0: it does not report that
    stand: Stand
    phases: tuple[float, ...]  # seconds, as PHASES


def _read_entry(written: bytes) -> PageEntry | None:
    numbers, *texts = written.rstrip(b"\0").decode(errors="replace").split("\0")
    with suppress(ValueError):
        rank, world_size, process, stacks, looks, seconds, waits, collectives, quiet_s, times = numbers.split()
        inside, line = [*texts, "", ""][:2]
        stand = Stand(line, inside, float(seconds), int(waits), int(collectives), float(quiet_s))
        phases = tuple(map(float, times.split("/"))) if times != "-" else ()
        return PageEntry(int(rank), int(world_size), int(process), int(stacks), int(looks), stand, phases)
    return None


class Page:
    """The page, by its open file."""

    def __init__(self, file: int) -> None:
        self.file = file

    @property
    def path(self) -> str:
        """How other processes of this host open it."""
        return f"/proc/{os.getpid()}/fd/{self.file}"

    def write(self, step: int, moves: int, looks: int, uses: int = 0) -> None:
        os.pwrite(self.file, f"{step:020d} {moves:020d} {looks:020d} {uses:020d}\n".encode(), 0)

    def read(self) -> Beat:
        written = os.pread(self.file, _COUNTS, 0).replace(b"\0", b" ").split()
        touched = os.fstat(self.file).st_mtime_ns
        if len(written) != 4 or not all(map(bytes.isdigit, written)):  # a program may write there, too
            return Beat(touched=touched)
        step, moves, looks, uses = map(int, written)
        return Beat(step, moves, looks, touched, uses)

    def write_place(self, stand: Stand) -> None:
        """Write the line of the rank's main thread, and whether it waits. `Stand()`: it gets on."""
        written = f"{stand.waits}{stand}".encode(errors="replace")[:_PLACE]
        os.pwrite(self.file, written.ljust(_PLACE, b"\0"), _PLACE_AT)

    def read_place(self) -> Stand:
        written = os.pread(self.file, _PLACE, _PLACE_AT).strip(b"\0").decode(errors="replace")
        waits, line = written[:1], written[1:]  # a program may write there, too
        return Stand(line, waits=int(waits)) if waits in {str(NO_WAIT), str(MAY_WAIT), str(WAITS)} else Stand()

    def read_entries(self) -> list[PageEntry]:
        """Read the entries of the ranks that write to this page by `guard/hpcddp_stand.py`."""
        size = os.fstat(self.file).st_size
        written = [os.pread(self.file, STAND, at) for at in range(STAND_AT, size, STAND)]
        return [entry for entry in map(_read_entry, written) if entry is not None]

    def write_end(self, at: float) -> None:
        self._write_time(at, _END_AT)

    def read_end(self) -> float | None:
        """The time at which the job ends, if it has changed since the start."""
        return self._read_time(_END_AT)

    def write_lease(self, until: float) -> None:
        """Write when the rank ends itself, on the monotonic clock of this host, unless a later time is written."""
        self._write_time(until, _LEASE_AT)

    def read_lease(self) -> float | None:
        """Read the time at which the rank ends itself; None: never."""
        return self._read_time(_LEASE_AT)

    def _write_time(self, at: float, where: int) -> None:
        """Write, and leave the page as old as before: the rank has written nothing."""
        touched = os.fstat(self.file)
        os.pwrite(self.file, f"{at:020.1f}\n".encode(), where)
        os.utime(self.file, ns=(touched.st_atime_ns, touched.st_mtime_ns))

    def _read_time(self, where: int) -> float | None:
        written = os.pread(self.file, 21, where).strip(b"\n\0")
        return float(written) if written.replace(b".", b"").isdigit() else None


def make_page() -> Page:
    return Page(os.memfd_create("hpcddp-heartbeat"))


def open_page(path: str | None) -> Page | None:
    """The page that this rank's agent made; None if there is none to be seen, as in some containers."""
    if path:
        with suppress(OSError):
            return Page(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    return None
