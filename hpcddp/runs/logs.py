"""Output of a run's ranks: `logs/job.log` of each attempt, and a file for each rank but the first.

The time of a line is the one that it begins with, as the lines of Python's logging do; a line without one goes with the
line before it in its file.
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

_END = 1 << 24  # bytes, in which the last lines are
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
        return "job" if self.rank is None else f"{self.host} rank {self.rank}"


def order_attempts(run: RunFolder) -> list[AttemptFolder]:
    """The attempts in the order in which they took the run. Those whose holders cannot be read stand first."""
    attempts = list_attempts(run)  # first: an attempt holds the run before it has a folder
    turns = {hold.holder.attempt: turn for turn, hold in enumerate(read_holds(run), 1)}
    return sorted(attempts, key=lambda one: (turns.get(one.name, 0), one.name))


def list_sources(attempt: AttemptFolder, ranks: frozenset[int] | None = frozenset()) -> list[LogFile]:
    """The files of these ranks; None: of all; none is named: `job.log`, which has rank 0's."""
    try:
        names = sorted(os.listdir(os.path.dirname(attempt.log)))
    except OSError:
        return []
    found = []
    if os.path.basename(attempt.log) in names and (not ranks or 0 in ranks):
        found.append(LogFile(attempt.log, attempt.name))
    for match in filter(None, map(_NAME.fullmatch, names)):
        rank = int(match[1])
        if ranks is None or rank in ranks:
            found.append(LogFile(attempt.rank_log(rank, match[2]), attempt.name, rank, match[2]))
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
    """The file's lines, or the last of them; and the offset behind them. `whole`: without a line that has no end."""
    try:
        with open(path, "rb") as file:
            begin = 0 if last is None else max(os.fstat(file.fileno()).st_size - _END, 0)
            file.seek(begin)
            text = file.read()
    except OSError:
        return [], 0
    cut = text.rfind(b"\n") + 1 if whole else len(text)
    lines = text[:cut].removesuffix(b"\n").split(b"\n") if cut else []
    return lines[-last:] if last else lines, begin + cut


def merge(lines: Sequence[tuple[LogFile, Sequence[bytes]]]) -> Iterator[tuple[LogFile, bytes]]:
    """All lines in the order of their times; those of files without any stand first, file after file."""

    def timed(source: LogFile, of_file: Sequence[bytes]) -> Iterator[tuple[float, LogFile, bytes]]:
        time = 0.0
        for line in of_file:
            time = max(find_time(line) or time, time)
            yield time, source, line

    for _, source, line in heapq.merge(*(timed(*one) for one in lines), key=lambda one: one[0]):
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
