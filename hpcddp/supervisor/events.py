"""Events in the life of a rank, and which of several was the first cause."""

from __future__ import annotations

import os
import re

from hpcddp.errors import PEER_FAILED
from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.runs.failure import describe_end
from hpcddp.runs.heartbeat import NO_RANK

if TYPE_CHECKING:
    from collections.abc import Sequence

ERROR, KILLED, GONE, SILENT, STUCK = "error", "killed", "gone", "silent", "stuck"
LEFT, UNKNOWN, ABSENT, UNHEARD = "left", "unknown", "absent", "unheard"
#: Of hosts that the check before the start has found unfit.
UNFIT = "unfit"

# The last line of a rank that failed because another one ended: an error of torch or of the network below the program.
_OF_NETWORK = re.compile(
    r"^([\w.]+\.)?(PeerFailedError|DistNetworkError|DistStoreError|DistBackendError)\b"
    r"|^(nccl\w*|Last error|Proxy call)\b"
    r"|^RuntimeError: .*(gloo|NCCL|ProcessGroup|Connection|Broken pipe|Timed out|Socket Timeout)"
    r"|ranks did not arrive in",
    re.IGNORECASE,
)
_TIMEOUT = re.compile(
    r"Timed out waiting|collective operation timeout|clients joined|wait timeout after", re.IGNORECASE
)
_SIGKILL, _SIGTERM = 9, 15
_CRASHES = {4, 6, 7, 8, 11}  # SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV

#: RequestError's and SiteError's, argparse's, and a shell's for a command that it cannot run or find.
_MISTAKES = {2, 3, 126, 127}


class Event(Record):
    """An event of a rank. `at`: when, in seconds from anywhere. `step`: the last one that it was seen to make.
    `status`: its wait status, once it has ended. `text`: the last line of its output, of an error. `is_sure`: it is
    this rank, and no other. `signal`: that had come to it and by which it may have ended; 0: none."""

    kind: str
    rank: int
    host: str
    at: float = 0.0
    step: int = 0
    status: int = 0
    text: str = ""
    is_sure: bool = True
    signal: int = 0

    @property
    def _code(self) -> int:
        """The exit status of an error; else -1."""
        return os.WEXITSTATUS(self.status) if self.kind == ERROR and os.WIFEXITED(self.status) else -1

    @property
    def _killed_by(self) -> int:
        return os.WTERMSIG(self.status) if self.kind == KILLED else 0

    @property
    def is_loss(self) -> bool:
        """Whether ranks were lost, by no fault that their program has reported. So is a launcher that was killed."""
        if self.kind == UNKNOWN:
            return self.status > 128
        if self.kind == ERROR:  # as hpcddp's runtime, torch or the network ends a rank after another one's failure
            return self._code == PEER_FAILED or _OF_NETWORK.search(self.text) is not None
        return self.kind != LEFT

    @property
    def is_mistake(self) -> bool:
        """Whether the program, or hpcddp in it, has refused what it was asked for, or could not be started."""
        return self._code in _MISTAKES

    @property
    def is_of_another(self) -> bool:
        """Whether it failed because another rank had failed."""
        return (self.kind == ERROR and self.is_loss) or self.is_clean_up

    @property
    def is_clean_up(self) -> bool:
        """Whether it was ended by the launcher, which knows why: nobody else sends SIGTERM to a rank alone."""
        return self._killed_by == _SIGTERM

    @property
    def is_by_program(self) -> bool:
        """Whether the program ended by itself: by an error that it reported, or a crash."""
        return self._killed_by in _CRASHES or (self.kind == ERROR and not self.is_loss)

    @property
    def is_loss_of_work(self) -> bool:
        """Whether a rank was ended from outside, and not by its launcher: what its program still wanted to do after its
        training is not done."""
        if self.kind == KILLED:
            return self._killed_by not in {*_CRASHES, _SIGTERM}
        return self.kind in {SILENT, GONE, UNHEARD} or (self.kind == UNKNOWN and self.status == 128 + _SIGKILL)

    @property
    def exit_status(self) -> int:
        """The exit status of the rank's program, as in a shell; 0: it does not say why the attempt ended."""
        if self.kind not in {ERROR, KILLED} or self.is_of_another:
            return 0
        return 128 + self._killed_by if self.kind == KILLED else self._code

    def __str__(self) -> str:
        if self.kind in {UNKNOWN, ABSENT, UNFIT}:
            return self.text
        rank = f"rank {self.rank} on {self.host}" if self.rank != NO_RANK else self.host
        since = f" since step {self.step}" if self.step else ""
        if self.kind == SILENT:
            return f"{self.host} is silent{since} (rank {self.rank})"
        if self.kind == GONE:
            return f"{rank} vanished without a word{f' after step {self.step}' if self.step else ''}"
        if self.kind == LEFT:
            return f"{rank} {describe_end(self.status)} while {self.text or 'others still trained'}"
        if self.kind == STUCK:
            return f"no rank gets on{since}; {rank} {self.text}"
        if self.kind == UNHEARD:
            return f"{rank} was ended, since it had not heard the supervisor for {self.text} s"
        if self.kind == ERROR and self.text:
            return f"{rank}: {self.text}"
        return f"{rank} {describe_end(self.status)}"


def is_timeout(text: str) -> bool:
    """Whether this last line of a rank's output says that a collective has waited for too long."""
    return _TIMEOUT.search(text) is not None


def read_shell_status(status: int) -> int:
    """The wait status of a rank's program, also where a shell around it (`bash train.sh`) says that it was a signal."""
    number = os.WEXITSTATUS(status) - 128 if os.WIFEXITED(status) else 0
    return number if number in {*_CRASHES, _SIGKILL, _SIGTERM} else status


def find_first_cause(events: Sequence[Event]) -> Event | None:
    """The event that the others follow from, which need not be the first: another rank may still write its traceback.
    None if nothing has happened."""
    in_order = sorted(events, key=lambda event: event.at)
    if not in_order or not in_order[0].is_of_another:
        return in_order[0] if in_order else None
    causes = (event for event in in_order if event.kind in {ERROR, LEFT} and not event.is_of_another)
    return next(causes, in_order[0])
