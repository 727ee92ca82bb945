"""The first failure of a run: the rank that failed reports it, the others name that rank."""

from __future__ import annotations

from typing import NamedTuple

from hpcddp.errors import HpcddpError


class Failure(NamedTuple):
    """The first failure of a run, as the rank that had it wrote it to the store."""

    rank: int
    host: str
    what: str

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} failed: {self.what}"


class PeerFailedError(HpcddpError):
    """This rank is well, but another one failed and took the process group with it."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure), f"the log of rank {failure.rank} has the whole story")
