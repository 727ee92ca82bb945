"""What is known of one rank while its attempt runs."""

from __future__ import annotations

from hpcddp.record import TYPE_CHECKING
from hpcddp.runs.heartbeat import Beat

if TYPE_CHECKING:
    import _socket


class RankReport:
    """Times are of the monotonic clock; 0: not yet."""

    def __init__(self, rank: int, host: str, now: float) -> None:
        self.rank, self.host = rank, host
        self.connection: _socket.socket | None = None
        self.begun = b""  # of a message
        self.heard = self.moved = self.looked = now
        self.beat = Beat()
        self.is_stopped = False
        self.place = ""  # where its program stands, if it does
        self.has_touched = False  # its page, of a program that says nothing else
        self.has_left = False  # the runtime: what its program does then, it does not say
        self.left = 0.0  # when its connection broke
        self.status: int | None = None  # its wait status, once it has ended
        self.is_told = False  # whether there is an event about it

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be expected of it."""
        return self.status is not None or (self.is_told and self.connection is None)
