"""What a check says."""

from __future__ import annotations

from hpcddp.record import Record


class Check(Record):
    """A finding: something that works against the run although it may go on. `remedy` is something to do."""

    name: str
    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}"


class Machine(Record):
    """What the checks need to know of this host. None: unknown, as for a recorded environment."""

    cpus: int | None = None  # that this process may use
    cores: int | None = None  # of the host, as the kernel counts
    memlock: int | None = None  # bytes that may be locked; -1: no limit
    infiniband: bool = False
    interfaces: tuple[str, ...] | None = None
    nccl_plugins: tuple[str, ...] | None = None  # files of NCCL network plugins on LD_LIBRARY_PATH
