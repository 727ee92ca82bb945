"""What is known of one rank while its attempt runs."""

from __future__ import annotations

import os
import re

from hpcddp.record import TYPE_CHECKING
from hpcddp.runs.heartbeat import Beat
from hpcddp.supervisor.end import UNFINISHED

if TYPE_CHECKING:
    import _socket

#: That a rank may take to save and end after a signal, also one that is no wish to end the job.
SAVES_S = 300.0
# Where ranks wait for each other, by the innermost function that the program's line is in: collectives of torch and of
# FSDP, and hpcddp's own exchanges.
_IN_COLLECTIVE = re.compile(
    r"\(in ((\w*_)?(all_\w+|barrier|broadcast\w*|gather\w*|reduce\w*|scatter\w*|send|recv|wait_tensor)"
    r"|pull|last_vote|_end_oldest|wait_until)\)$"
)
# Where they may wait, or compute: the backward pass, in which DDP's buckets are reduced; operators of a DTensor; and
# for a GPU whose collective does not end, or a work handle, by the call in the line itself (no Python function).
_MAY_WAIT = re.compile(
    r"\(in (_engine_run_backward|__call__|synchronize)\)$|\.(wait|item|cpu|tolist|synchronize)\(\)(?!.*\(in \w+\)$)"
)


class RankReport:
    """Times are of the monotonic clock; 0: not yet."""

    def __init__(self, rank: int, host: str, now: float) -> None:
        self.rank, self.host = rank, host
        self.connection: _socket.socket | None = None
        self.begun = b""  # of a message
        self.heard = self.moved = self.used = self.looked = now
        self.beat = Beat()
        self.is_stopped = False
        self.place = ""  # where its program stands, if it does
        self.has_touched = False  # its page, of a program that says nothing else
        self.has_left = False  # the runtime: what its program does then, it does not say
        self.left = 0.0  # when its connection broke
        self.status: int | None = None  # its wait status, once it has ended
        self.signals: dict[int, float] = {}  # that it had before the launcher ended ranks, and when
        self.signal = 0  # of these, the one by which it may have ended
        self.unheard_s = 0  # for how long it had not heard this process when it was ended for that
        self.is_told = False  # whether there is an event about it

    def forgive(self, now: float) -> None:
        """Nobody could be heard until now."""
        self.heard = self.moved = self.used = self.looked = now
        self.left = now if self.left else 0.0

    @property
    def is_held(self) -> bool:
        """Whether it has ended, and its agent waits for ranks that still save."""
        return self.status is not None and self.connection is not None

    def find_signal(self, status: int, now: float) -> int:
        """The signal by which it may have ended with this wait status: by a status of its own, or killed by that very
        signal. 0: by none."""
        killed_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        return next((one for one, at in self.signals.items() if killed_by in {0, one} and now - at <= SAVES_S), 0)

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be expected of it."""
        return self.status is not None or (self.is_told and self.connection is None)

    @property
    def is_well(self) -> bool:
        """Whether it has ended, with 0 or as a run that is to be continued."""
        if self.status is None:
            return False
        return self.status == 0 or (os.WIFEXITED(self.status) and os.WEXITSTATUS(self.status) == UNFINISHED)


def find_odd(ranks: list[RankReport]) -> tuple[list[RankReport], bool]:
    """Those that stand where few others do, and do not wait for others if some do not: those wait for them; and whether
    that names one host. Where it tells none from the others: the first one."""
    left = ranks
    for waits in (_IN_COLLECTIVE, _MAY_WAIT):
        left = [one for one in left if not waits.search(one.place)] or left
    places = [one.place for one in left]
    fewest = min(map(places.count, places))
    odd = [one for one in left if places.count(one.place) == fewest]
    if len(odd) == len(ranks) > 1:
        return ranks[:1], False
    return odd, len({one.host for one in odd}) == 1
