"""What the ranks of a run have printed: `logs/job.log` of each attempt, and a file for each rank but the first.

Nobody notes when a line was printed. A line's time is what it begins with, as those of Python's logging do; a line
without one goes with the line before it in its file.
"""

from __future__ import annotations

import heapq
import os
import re
from collections.abc import Iterator, Sequence
from datetime import datetime

from hpcddp.record import Record
from hpcddp.runs.folder import AttemptFolder, RunFolder, list_attempts
from hpcddp.runs.lock import read_holds

_BLOCK = 65536  # bytes
_NAME = re.compile(r"rank-(\d+)\.(.+)\.log")
_TIME = re.compile(rb"\W{0,2}(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?(Z|[+-]\d\d:?\d\d)?\b")


class LogFile(Record):
    """One file. `rank`: None of `job.log`, which has what the launcher and rank 0 print."""

    path: str
    attempt: str
    rank: int | None = None
    host: str = ""

    @property
    def label(self) -> str:
        """What stands in front of its lines where there are several files."""
        return "job" if self.rank is None else f"{self.host} rank {self.rank}"


def order_attempts(run: RunFolder) -> list[AttemptFolder]:
    """The attempts in the order in which they began: that in which they took the run. Those whose holders
    cannot be read stand first, by the times of their files."""
    attempts = list_attempts(run)  # first: an attempt holds the run before it has a folder
    turns = {hold.holder.attempt: turn for turn, hold in enumerate(read_holds(run), 1)}
    return sorted(attempts, key=lambda one: (turns.get(one.name, 0), _began(one), one.name))


def list_sources(
    attempt: AttemptFolder, ranks: frozenset[int] | None = frozenset(), hosts: Sequence[str] = ()
) -> list[LogFile]:
    """The files of these ranks (None: of all) on these hosts (none: on any); without both `job.log`, as for rank 0,
    which is of the host of the job script."""
    folder = os.path.dirname(attempt.log)
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    found = []
    if os.path.basename(attempt.log) in names and (not ranks or 0 in ranks) and _is_on(attempt, hosts):
        found.append(LogFile(attempt.log, attempt.name))
    if ranks or ranks is None or hosts:
        for name in names:
            match = _NAME.fullmatch(name)
            if match is None:
                continue
            rank, host = int(match[1]), match[2]
            if (not ranks or rank in ranks) and (not hosts or _short(host) in map(_short, hosts)):
                found.append(LogFile(os.path.join(folder, name), attempt.name, rank, host))
    return found


class LogReader:
    """Reads one file as it grows: a line is given once its end is there."""

    def __init__(self, source: LogFile, offset: int = 0) -> None:
        self.source = source
        self._offset = offset
        self._rest = b""

    def read(self, *, ended: bool = False) -> list[bytes]:
        """The lines that were completed since the last call; `ended`: also the last one, without its end."""
        try:
            with open(self.source.path, "rb") as file:
                file.seek(self._offset)
                text = file.read()
        except OSError:
            return []
        self._offset += len(text)
        *lines, self._rest = (self._rest + text).split(b"\n")
        if ended and self._rest:
            lines, self._rest = [*lines, self._rest], b""
        return lines


def read_log_lines(path: str, last: int | None = None, *, whole: bool = False) -> tuple[list[bytes], int]:
    """The file's lines, or the last so many of them, read from its end; and the offset behind what was read. `whole`:
    without what stands behind the last line end."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if last is None:
                text = file.read()
                cut = text.rfind(b"\n") + 1 if whole else len(text)
                return _split(text[:cut]), cut
            blocks, at, ends = list[bytes](), size, 0
            while at > 0 and ends <= last:
                step = min(_BLOCK, at)
                at -= step
                file.seek(at)
                blocks.append(file.read(step))
                ends += blocks[-1].count(b"\n")
            text = b"".join(reversed(blocks))
            cut = text.rfind(b"\n") + 1 if whole else len(text)
            return (_split(text[:cut])[-last:] if last else []), size - len(text) + cut
    except OSError:
        return [], 0


def merge(lines: Sequence[tuple[LogFile, Sequence[bytes]]]) -> Iterator[tuple[LogFile, bytes]]:
    """All lines in the order of their times; those of files without any stand first, file after file."""

    def timed(
        number: int, source: LogFile, of_file: Sequence[bytes]
    ) -> Iterator[tuple[float, int, int, LogFile, bytes]]:
        time = 0.0
        for at, line in enumerate(of_file):
            time = max(find_time(line) or time, time)
            yield time, number, at, source, line

    each = [timed(number, source, of_file) for number, (source, of_file) in enumerate(lines)]
    for _, _, _, source, line in heapq.merge(*each, key=lambda one: one[:3]):
        yield source, line


def find_time(line: bytes) -> float | None:
    """The time that a line begins with, in seconds since 1970; one without a zone is in this host's."""
    found = _TIME.match(line)
    if found is None:
        return None
    day, clock, part, zone = (text.decode() if text else "" for text in found.groups())
    zone = "+00:00" if zone == "Z" else zone if ":" in zone or not zone else f"{zone[:3]}:{zone[3:]}"
    try:
        return datetime.fromisoformat(f"{day}T{clock}.{part or '0':0<6}{zone}").timestamp()
    except (ValueError, OverflowError):
        return None


def _is_on(attempt: AttemptFolder, hosts: Sequence[str]) -> bool:
    """Whether the job script was on one of these hosts; none: on any."""
    holders = [hold.holder for hold in read_holds(attempt.run)] if hosts else []
    of_it = [one.host for one in holders if one.attempt == attempt.name]
    return not hosts or any(_short(host) in map(_short, hosts) for host in of_it)


def _short(host: str) -> str:
    return host.partition(".")[0]


def _began(attempt: AttemptFolder) -> float:
    """When its folder was first written to, as far as its files still say it."""
    times = []
    for path in (os.path.join(attempt.path, "supervisor"), attempt.script, attempt.rank_environment(0), attempt.path):
        try:
            times.append(os.stat(path).st_mtime)
        except OSError:
            continue
    return min(times, default=0.0)


def _split(text: bytes) -> list[bytes]:
    lines = text.split(b"\n") if text else [b""]
    return lines if lines[-1] else lines[:-1]
