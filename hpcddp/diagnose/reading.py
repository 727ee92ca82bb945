"""Reads logs: the lines that fit a row, with their ranks, and the exceptions at the ends of tracebacks.

Lines that differ only in digits are compared with the rows once.
"""

from __future__ import annotations

import os
import re
import signal
from functools import lru_cache

from hpcddp.diagnose.progress import forget_caught
from hpcddp.diagnose.rows import CAUSE, END, LOST, NOISE, RAISED, RECORD, RESTART, ROWS, WEAK, Row
from hpcddp.errors import RequestError
from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.runs.failure import TRACEBACK, Traceback, find_prefix
from hpcddp.runs.logs import LogFile, find_time
from hpcddp.signals import name_signal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_MOST = 1 << 28  # bytes of one file, from its end
_LONGEST = 1 << 16  # bytes of a line, at its begin and at its end, that are looked at
_DIGITS = b"0123456789"
_NO_DIGITS = str.maketrans("", "", "0123456789")
_PLAIN_TRACEBACK = TRACEBACK.encode()
_LATER = ("During handling of the above exception", "was the direct cause of the following")
#: Words in front of a traceback that ends nothing.
_IGNORED = ("Exception ignored in", "Logging error", "Exception in thread", "atexit")
_LEVEL = re.compile(r"\b(ERROR|WARN\w*|CRITICAL|EXCEPTION)\b")
_OF_LAUNCHER = re.compile(
    rb"\s*$|srun: |slurmstepd|hpcddp: |hint: "
)  # which may print more after ranks are started again
#: The number of an attempt, of a job script that tries again or a job that is queued again.
_COUNTED = re.compile(rb"(?i)\b(attempt|try|retry|restart(?: count)?)\b\W{0,3}(\d{1,3})\b(?!.*(fail|giv))")
#: Words of a program that goes on after an error.
SURVIVED = re.compile(
    r"(?i)\bwill retry|retrying|trying again|ignor(ed|ing)\b|fall(ing|s)? ?back|(go(es|ing)|carry(ing)?) on\b"
    r"|\b(continu(es|ing)|instead|without it)\b|\bus(e|ing) (the |its |a )?(default|built|slow)"
    r"|(default|built-in)\w*\b.*\b(used|taken)\b|(?-i:\bWARN(ING)?\b)|\"warn(ing)?\""
)
_EXIT = re.compile(
    r"(?i)\bexit(?:ed)?(?: with)?[ _](?:status|code)\W{0,3}(\d{1,3})\b|\b(?:status|rc)[ =]\(?(\d{1,3})\)?\s*$"
)
_FRAME = re.compile(r'File "(.+?)", line (\d+), in (\S+)')
_INSIDE = re.compile(r'File ".+", line \d+, in (?!<module>|_run_|_bootstrap|_worker_loop)')
_LOADS = re.compile(r"torch/serialization\.py\", line \d+, in (load|_load|_legacy_load)$")
_LIBRARY = re.compile(r"(site|dist)-packages/|/lib/python\d|<frozen|<string>|/bin/(torchrun|accelerate)$")
_WORLD = re.compile(
    rb"[Rr]ank\W{0,3}\d+\s?(?:of|/)\s?(\d+)\b|initiali[sz]ed \d+ of (\d+)\b|hpcddp: (\d+) ranks on"
    rb"|world.?size\W{1,3}(\d+)\b|\b(\d+) (?:processes|ranks)\b"
    rb"|Starting with (\d+) processes|\bnranks (\d+)|MEMBER: \d+/(\d+)|\d/(\d+) clients joined"
)
_SAMPLE = 100_000  # bytes at both ends, in which ranks that are numbers without a name, and their count, are found
#: Labels with a rank, at a line's begin (_PREFIX) or anywhere in it.
_PREFIX = re.compile(
    r"(?:\[(?:rank|default|trainer|worker)[ :]?(\d+)\]:? ?|\[(\d+)\]:? (?=\S)|(\d{1,5}): (?=\S)"
    r"|\[\d+,(\d+)\]<std\w+>: ?|\[\S+@\d+,(\d+)\]<std\w+>: ?)"
)
_LABEL = re.compile(
    rb"\[[Rr]ank[ :=]?(\d+)\]|^\[[^\]]*\]\[(\d{1,5})\]\[|^\[(\d+)\]:? (?=\S)|^(\d{1,5}): (?=\S)"
    rb"|^\[\d+,(\d+)\]<std|^\[\S+@\d+,(\d+)\]<std|^[(<](\d+)[)>] |\b[Rr]ank\W{0,4}(\d+)\b|\bworker[-_](\d+)\b"
    rb"|(?:^|[ \[(|])r(\d{1,4})[\])|: ]|[\[(]R(\d{1,4})[\])]"
)
_SIGNED = re.compile(r"\[rank\d+\]:")  # torch's, in front of what ends a rank
_SPAWNED = re.compile(r"^-- Process (\d+) terminated with the following error:")
_NAMED = re.compile(rb"ank[ :=]?(\d+)\b")
_MOST_RANKS = 1_000_000
_OF_FILE = re.compile(r"(?:rank|task|proc)[-_.]?0*(\d+)\b|attempt_\d+/(\d+)/std(?:out|err)\.log$")
LOG_NAME = re.compile(r"\.(out|err|log|txt)$|\.[oe]\d+(\.\d+|-\d+)?$")
_REPORT = re.compile(r"hpcddp: rank (\d+) on ([\w.-]+) .* The end of its output:")
_KILLS = {4, 6, 7, 8, 9, 11, 15}
_SIGNALS = {name_signal(number): number for number in range(1, 32)}
_SIGNALS |= {(signal.strsignal(number) or "").lower(): number for number in range(1, 32)}  # as shells and srun say it


class Mark(Record):
    """A line that fits a row, or an exception: then `row` may be None. `number`: its line, from 1. `level`: its row's,
    or RAISED. `frame`: the innermost line of the program in its traceback. `chain`: the same for exceptions of which
    one led to the next. `is_accident`: the handler of the one before ran into it. `is_quoted`: hpcddp reports it."""

    row: Row | None
    level: str
    log: int
    number: int
    text: str
    body: str
    rank: int | None = None
    host: str = ""
    signal: int = 0
    status: int | None = None
    frame: str = ""
    chain: int = 0
    is_raised: bool = False
    is_logged: bool = False
    is_caught: bool = False
    is_quoted: bool = False
    is_accident: bool = False
    ranks: tuple[int, ...] = ()

    def list_ranks(self) -> tuple[int, ...]:
        """The ranks that the line names, else the one that printed it."""
        return self.ranks or (() if self.rank is None else (self.rank,))

    @property
    def cause(self) -> str:
        return self.row.cause if self.row is not None else "exception"

    @property
    def is_signed(self) -> bool:
        """An exception behind torch's `[rank1]:`, which ends a rank of a process group."""
        return self.is_raised and _SIGNED.search(self.text) is not None


class Log:
    """One file. `ranks`: those that have printed something with their number."""

    def __init__(self, number: int, source: LogFile, lines: list[bytes], skipped: int) -> None:
        self.number, self.source, self.lines, self.skipped = number, source, lines, skipped
        self.marks: list[Mark] = []
        self.exit_status: int | None = None
        self.passed = set[int]()  # the last lines of tracebacks that ended nothing
        text = b"\n".join(lines)
        self.begin = text[:_SAMPLE]
        labels = (_LABEL.search(line) for line in (self.begin + text[-_SAMPLE:]).split(b"\n"))
        self.ranks = {int(rank) for rank in set(_NAMED.findall(text)) if len(rank) < 7}
        self.ranks |= {rank for rank in map(_read_number, labels) if rank is not None}
        sizes = (_read_number(size) or 0 for size in _WORLD.finditer(self.begin))
        self.world_size = max((size for size in sizes if size < _MOST_RANKS), default=0)

    @property
    def end(self) -> int:
        """The number behind its last line."""
        return len(self.lines) + self.skipped + 1

    def read_line(self, at: int) -> str:
        """The line at this index; "" outside of the log."""
        return self.lines[at].decode(errors="replace").rstrip() if 0 <= at < len(self.lines) else ""

    def read_lines(self, begin: int, end: int) -> str:
        """The lines from this index up to that one."""
        return b"\n".join(self.lines[max(begin, 0) : end]).decode(errors="replace")

    def find_time(self, number: int) -> float:
        """When the line was printed, at the earliest: by the last time in or before it; 0: none is near."""
        at = number - 1 - self.skipped
        for line in reversed(self.lines[max(at - 60, 0) : at + 1]):
            if (time := find_time(line)) is not None:
                return time
        return 0.0

    def find_rank(self, line: str) -> int | None:
        """The rank that printed the line, by its label or its file."""
        label = _LABEL.search(line.encode())
        return _read_number(label) if label is not None else self.source.rank


def _read_number(match: re.Match[bytes] | re.Match[str] | None) -> int | None:
    """The number in the group that has matched."""
    texts = match.groups() if match is not None else ()
    return next((int(text) for text in texts if text and len(text) < 7), None)


def find_logs(paths: Iterable[str]) -> list[LogFile]:
    """The logs of these files and folders. RequestError for one that is not there, or a folder without any."""
    found: dict[str, LogFile] = {}
    for path in paths:
        names = [path]
        if os.path.isdir(path):
            found_in = (os.path.join(folder, name) for folder, _, files in os.walk(path) for name in files)
            names = sorted(name for name in found_in if LOG_NAME.search(name) and os.path.isfile(name))
            if not names:
                raise RequestError(f"there is no log in {path}", "name the files: hpcddp diagnose FILE …")
        for name in names:
            match = _OF_FILE.search(name[-120:])
            rank = int(match[1] or match[2]) if match is not None else None
            host = name[:-4].rpartition("/")[2].partition(".")[2] if rank is not None and name.endswith(".log") else ""
            found[os.path.realpath(name)] = LogFile(name, "", rank, host)
    return sorted(found.values(), key=lambda one: (one.rank is not None, one.rank or 0))


def read_logs(sources: Sequence[LogFile]) -> list[Log]:
    """All files. RequestError for one that cannot be read."""
    return [_read(number, source) for number, source in enumerate(sources)]


def _read(number: int, source: LogFile) -> Log:
    try:
        with open(source.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            skipped = 0
            if size > _MOST:
                left = size - _MOST
                while left > 0 and (block := file.read(min(left, 1 << 24))):
                    skipped += block.count(b"\n")
                    left -= len(block)
            text = file.read()
    except OSError as error:
        raise RequestError(f"{source.path} cannot be read: {error.strerror}", f"ls -l {source.path}") from error
    sample = text[:4096].decode(errors="replace")
    if sum(c == "\ufffd" or c < "\b" for c in sample) > len(sample) / 4:
        unpack = f"zcat {source.path} > job.out; hpcddp diagnose job.out"
        raise RequestError(f"{source.path} is no text in UTF-8", f"if it is compressed: {unpack}")
    lines = [
        line if len(line) <= 2 * _LONGEST else line[:_LONGEST] + b" ... " + line[-_LONGEST:]
        for line in text.split(b"\n")
    ]
    log = Log(number, source, lines, skipped)
    _MarkReader(log).read()
    marks = log.marks
    log.marks = _choose_of_chains(marks)
    log.passed |= {mark.number for mark in marks} - {mark.number for mark in log.marks}
    log.world_size = max(log.world_size, *(rank + 1 for rank in log.ranks), 0)
    forget_caught(log)
    return log


def _choose_of_chains(marks: list[Mark]) -> list[Mark]:
    """The exception that counts of each chain: the first that a row names, else the last, but none that a handler ran
    into."""
    chains: dict[int, list[Mark]] = {}
    for mark in marks:
        chains.setdefault(mark.chain or -id(mark), []).append(mark)
    chosen = []
    for chain in chains.values():
        accident = next((nth for nth, mark in enumerate(chain) if nth and mark.is_accident), len(chain))
        named = [mark for mark in chain[:accident] if mark.row is not None]
        causes = [mark for mark in named if mark.level in {CAUSE, RAISED}]
        best = next(iter([*causes, *named]), chain[accident - 1])
        chosen.append(best._replace(is_logged=best.is_logged or chain[-1].is_caught))
    return sorted(chosen, key=lambda mark: mark.number)


def _choose_any(words: Iterable[str]) -> str:
    """A pattern that finds any of these words, by their common beginnings: ten times as fast as a plain choice."""
    ends: dict[str, list[str]] = {}
    for word in words:
        if not word:
            return ""
        ends.setdefault(word[0], []).append(word[1:])
    each = [re.escape(letter) + _choose_any(rest) for letter, rest in ends.items()]
    return each[0] if len(each) == 1 else f"(?:{'|'.join(each)})"


_SPECIAL = (TRACEBACK, *_LATER, "exit", "status", "rc=", "The end of its output", "hpcddp: ")
#: The row whose words have digits: lines are compared without theirs.
_ALONE = next(row for row in ROWS if row.level == WEAK and re.search(r"\d", row.key))
_KEYS = [(row, row.key.split("|")) for row in ROWS if row.level != RECORD and row is not _ALONE]
_REFUSED = next(row for row in ROWS if row.shows == "hpcddp: …, with a hint")
_ANY = re.compile(_choose_any({*_SPECIAL, *(key for _, keys in _KEYS for key in keys)}).encode())


class _LineKind(Record):
    """Lines that differ only in digits: the rows that they may fit. `is_special`: they may begin a traceback, a report
    or a refusal, or have an exit status."""

    is_special: bool = False
    rows: tuple[Row, ...] = ()


class _Line(Record):
    """A line to compare with rows. `at`: its index. `prefix`: the labels that it begins with, `body`: the rest. `rank`:
    by its file, the report that quotes it, or its labels."""

    at: int
    text: str
    prefix: str
    body: str
    rank: int | None
    host: str
    is_quoted: bool


class _OpenTraceback(Traceback):
    """A traceback that has not come to its exception."""

    def __init__(self, at: int, prefix: str, rank: int | None, chain: int, before: str = "") -> None:
        super().__init__(prefix)
        self.at, self.rank, self.chain, self.before = at, rank, chain, before
        self.is_logged = self.is_accident = False

    @property
    def is_ignored(self) -> bool:
        """The line before says that it ends nothing."""
        return any(word in self.before for word in _IGNORED)

    @property
    def is_caught(self) -> bool:
        """The traceback begins inside of a function, so that a caller may have caught it."""
        return bool(self.frames) and _INSIDE.search(self.frames[0]) is not None

    def find_frame(self) -> str:
        """The innermost line of the program, as `train.py:12`."""
        found = (frame for text in reversed(self.frames) if (frame := _FRAME.search(text)))
        lines = (f"{os.path.basename(at[1])}:{at[2]}" for at in found if not _LIBRARY.search(at[1]))
        return next(lines, "")


class _MarkReader:
    """Goes through the lines of one log."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._known: dict[bytes, _LineKind] = {}  # by the line without digits
        self._survived = set[bytes]()  # tracebacks, as `_find_block` gives them
        self._open: list[_OpenTraceback] = []
        self._restarts: list[int] = []  # lines
        self._exit_at = 0
        self._chains = 0
        self._last: tuple[str, int, Mark | None] = ("", 0, None)  # the last exception: its prefix, its line
        self._chained = ""  # the prefix of a traceback that follows from the last one
        self._is_accident = False  # how it does
        self._quoted: tuple[int, str] | None = None  # the rank, and host, of lines that a report of hpcddp's quotes

    def read(self) -> None:
        """Fill the log."""
        begin, next_at = self._log.begin, 0
        alone = {begin.count(b"\n", 0, found.start()) for found in re.finditer(_ALONE.pattern.encode(), begin)}
        for at, line in enumerate(self._log.lines):
            if at < next_at:
                continue
            if at in alone:
                self._read_line(at, line, _LineKind(rows=(_ALONE,)))
                continue
            for piece in line.split(b"\r"):
                alike = piece.translate(None, _DIGITS)
                if (kind := self._known.get(alike)) is None:
                    kind = self._known[alike] = _classify(alike)
                last = self._open[-1] if self._open else None
                if last and piece[:1] == b" " and not (last.prefix or kind.is_special or self._quoted):
                    if b'File "' in piece:
                        last.frames.append(piece.decode(errors="replace"))
                    continue
                is_plain = piece.startswith(_PLAIN_TRACEBACK) and not (last or self._quoted or self._chained)
                if is_plain and self._survived:
                    end, block = self._find_block(at)
                    if block in self._survived:
                        self._log.passed.add(end + 1 + self._log.skipped)
                        next_at = end + 1
                        break
                is_frame = piece.startswith(b"[rank") and b'File "' in piece
                if kind.is_special or kind.rows or last or self._quoted or is_frame:
                    self._read_line(at, piece, kind)
        self._forget_attempts()

    def _find_block(self, at: int) -> tuple[int, bytes]:
        """The index of the exception of the traceback that begins at this one, and its lines with the one before and
        the two behind it, without digits."""
        lines, end = self._log.lines, at + 1
        while end < len(lines) and lines[end][:1] == b" ":
            end += 1
        return end, b"\n".join(lines[max(at - 1, 0) : end + 3]).translate(None, _DIGITS)

    def _forget_attempts(self) -> None:
        """Remove the marks before the last attempt, which begins where ranks are started again, or where a number of
        attempts goes up after a launcher has reported a rank's end."""
        log, skipped, over = self._log, self._log.skipped, 0
        for number in self._restarts:  # what the launcher prints right then is about the attempt before
            below = log.lines[number - skipped :]
            over = number + next((nth for nth, line in enumerate(below) if not _OF_LAUNCHER.match(line)), 0)
        ends = [mark.number for mark in log.marks if mark.level == END or "ChildFailed" in mark.body]
        counts: dict[bytes, tuple[int, int]] = {}  # word -> the highest count, and its line
        for number, line in enumerate(log.lines, 1 + skipped) if ends else ():
            if (found := _COUNTED.search(line)) is None:
                continue
            word, count = found[1].lower(), int(found[2])
            before, last = counts.get(word, (-1, 0 if word.startswith(b"re") else number))
            if count > before:
                counts[word] = count, number
                over = number if any(last < end < number for end in ends) else over
        log.exit_status = log.exit_status if self._exit_at > over else None
        log.marks = [mark for mark in log.marks if mark.number > over]

    def _read_line(self, at: int, piece: bytes, kind: _LineKind) -> None:
        text, source = piece.decode(errors="replace").rstrip(), self._log.source
        rank, host, is_quoted = source.rank, source.host, False
        if self._quoted is not None and (text.startswith("    ") or not text.strip()):
            (rank, host), text, is_quoted = self._quoted, text[4:], True
        else:
            self._quoted = None
        body, prefix = _split_labels(text)
        labelled = _PREFIX.match(prefix) or (_LABEL.search(piece) if rank is None else None)
        rank = _read_number(labelled) if labelled is not None else rank
        line = _Line(at, text, prefix, body, rank, host, is_quoted)
        if (kind.is_special and self._read_special(line)) or self._continue_traceback(line):
            return
        if text.startswith("[rank") and _FRAME.match(body):  # torch's, whose first lines are cut off
            self._open.append(_OpenTraceback(at, prefix, rank, self._new_chain()))
            self._open[-1].frames.append(body)
            return
        for row in kind.rows:
            if (match := row.match(body)) is not None:
                if row.level not in {RAISED, WEAK} or not SURVIVED.search(body):
                    self._add(line, row, match)
                return

    def _read_special(self, line: _Line) -> bool:
        """Begin a traceback, a quotation or a refusal, or record an exit status. True: the line has no more to read."""
        if TRACEBACK in line.text:
            self._open_traceback(line)
            return True
        if any(word in line.text for word in _LATER):
            self._chained, self._is_accident = line.prefix.strip() + "|", _LATER[0] in line.text
            return True
        if line.body.startswith("hpcddp: "):
            if (report := _REPORT.search(line.text)) is not None:
                self._quoted = int(report[1]), report[2]
            else:
                self._read_refusal(line)
        for found in _EXIT.finditer(line.text):
            self._log.exit_status, self._exit_at = int(found[1] or found[2]), line.at + 1 + self._log.skipped
        return False

    def _open_traceback(self, line: _Line) -> None:
        log = self._log
        head = line.text.partition(TRACEBACK)[0].removesuffix("Original ")
        before, rank, prefix = log.read_line(line.at - 1), line.rank, ""
        ranked = re.search(r"(\[rank(\d+)\]:? ?)$", head)
        if ranked is not None:
            prefix, rank = ranked[1], int(ranked[2])
        elif (labelled := _PREFIX.match(head)) is not None:
            prefix = labelled[0]
        if ranked is None and (spawned := _SPAWNED.match(before)) is not None:
            rank = int(spawned[1])
        is_logged = ranked is None and _is_logged(before)
        rank = log.find_rank(before) if is_logged and rank is None else rank
        prefix = find_prefix(head, log.read_line(line.at + 1)) or prefix
        follows = self._chained == prefix.strip() + "|" or "The above" in before
        last = self._last[2]
        chain = last.chain if follows and last is not None else self._new_chain()
        opened = _OpenTraceback(line.at, prefix, rank, chain, before)
        opened.is_logged = is_logged
        opened.is_accident = follows and self._is_accident
        self._open.append(opened)
        self._chained = ""

    def _read_refusal(self, line: _Line) -> None:
        """An error of hpcddp's: its first line, which indented ones may continue, and its hint."""
        for at in range(line.at + 1, line.at + 20):
            text = self._log.read_line(at)[4 if line.is_quoted else 0 :]
            body, prefix = _split_labels(text)
            if prefix.strip() != line.prefix.strip() or not (
                body.startswith("hint: ") or text[len(prefix) :][:1] == " "
            ):
                return
            if body.startswith("hint: "):
                whole = f"{line.body}\n{body}"
                if (match := _REFUSED.match(whole)) is not None:
                    self._add(line._replace(body=whole), _REFUSED, match)
                return

    def _new_chain(self) -> int:
        self._chains += 1
        return self._log.number * 1_000_000 + self._chains

    def _continue_traceback(self, line: _Line) -> bool:
        """Add the line to the open traceback that it belongs to. False: to none."""
        for opened in reversed(self._open):
            if opened.add(line.text):
                if opened.error:
                    self._open.remove(opened)
                    self._end_traceback(line, opened)
                return True
        return False

    def _end_traceback(self, line: _Line, opened: _OpenTraceback) -> None:
        log, body, number = self._log, opened.error, line.at + 1 + self._log.skipped
        is_caught = opened.is_caught
        if opened.is_ignored:
            return
        near = (opened.before, log.read_line(line.at + 1), log.read_line(line.at + 2))
        is_followed = any(word in text for text in near for word in _LATER)
        if is_caught and not is_followed and any(_says_survived(text.translate(_NO_DIGITS)) for text in near):
            log.passed.add(number)
            end, block = self._find_block(opened.at)
            kinds = [self._known.get(each.translate(None, _DIGITS)) for each in log.lines[opened.at + 1 : end + 1]]
            if end == line.at and all(kind is not None and not kind.is_special for kind in kinds):
                self._survived.add(block)
            return
        row = _find_row(f"{body} (torch.load)" if any(_LOADS.search(frame) for frame in opened.frames) else body)
        level = RAISED if row is None or row.level in {CAUSE, RAISED} else row.level
        match = row.match(body) if row is not None else None
        rank = (
            opened.rank if opened.rank is not None else 0 if "clients joined" in body else line.rank
        )  # whom others call
        is_named = row is not None and row.level == CAUSE  # as by a signal's handler that torch runs there
        is_accident = opened.is_accident and not is_named and "raise " not in log.read_line(line.at - 1)
        named = _read_groups(match)
        whose = named.get("rank", rank) if level in {RAISED, END} else rank
        mark = Mark(
            row, level, log.number, number, line.text.strip(), body, whose, line.host, named.get("signal", 0),
            frame=opened.find_frame(), chain=opened.chain, is_raised=True, is_logged=opened.is_logged,
            is_caught=is_caught, is_accident=is_accident, ranks=_read_ranks(match),
            is_quoted=line.is_quoted,
        )  # fmt: skip
        log.marks.append(mark)
        self._last = opened.prefix.strip(), line.at, mark

    def _add(self, line: _Line, row: Row, match: re.Match[str]) -> None:
        log, at, body, rank, host = self._log, line.at, line.body, line.rank, line.host
        if row.level == RESTART:
            self._restarts.append(at + 1 + log.skipped)
            return
        named = _read_groups(match)
        number, status = named.get("signal", 0), named.get("status")
        if status is not None and status < 0:
            number, status = -status, None
        text = line.text
        if row.level == END and body.startswith("exitcode"):
            listed = re.search(r"rank +: (\d+)", log.read_lines(at - 2, at))
            rank = int(listed[1]) if listed is not None else rank
        elif row.level == END and "noticed that process" in body and not number:  # Open MPI 5 breaks the line
            below = log.read_line(at + 1)
            if (found := re.match(r"signal (\d+)", below.strip())) is not None:
                number, text, at = int(found[1]), below, at + 1
        elif row.level == END and any(word in body for word in ("EXIT STRING", "KILLED BY SIGNAL", "EXIT CODE")):
            above = log.read_lines(at - 8, at)  # of MPICH and Intel MPI
            where = re.search(r"(?:RANK (\d+) )?PID (\d+) RUNNING AT (\S+)", above)
            if where is not None:
                rank, host = int(where[1]) if where[1] else self._find_rank_of_pid(int(where[2]), rank), where[3]
            if "EXIT CODE" in body and status in _KILLS:  # of MPICH, whose string below may be cut off
                number, status = status, None
            if "EXIT STRING" in body:  # which says more than the code above it
                log.marks = [m for m in log.marks if "EXIT CODE" not in m.body or at + log.skipped - m.number > 7]
        host = match.groupdict().get("host") or match.groupdict().get("host_too") or host
        mark = Mark(
            row, row.level, log.number, at + 1 + log.skipped, text.strip(), body, named.get("rank", rank), host, number,
            status, ranks=_read_ranks(match), is_quoted=line.is_quoted,
        )  # fmt: skip
        last_prefix, last_at, last = self._last
        is_near = 0 < line.at - last_at <= 12 and line.prefix.strip() == last_prefix
        if (
            is_near and last is not None and log.marks[-1].chain == last.chain and row.level in {RAISED, LOST}
        ):  # more of what the exception says
            mark = mark._replace(chain=last.chain, is_raised=True, rank=last.rank)
            mark = mark._replace(is_logged=last.is_logged, is_caught=last.is_caught)
        log.marks.append(mark)

    def _find_rank_of_pid(self, pid: int, rank: int | None) -> int | None:
        """The rank of a process by the PIDs in NCCL's lines: a launcher starts a node's ranks in their order."""
        log = self._log
        pids = sorted({int(found) for found in re.findall(r"(?m)^\S+?:(\d+):\1 \[\d+\] NCCL", log.read_lines(0, 4000))})
        return (
            pids.index(pid)
            if pid in pids and len(pids) == max(log.world_size, *(rank + 1 for rank in log.ranks), 0)
            else rank
        )


def _classify(alike: bytes) -> _LineKind:
    text = alike.decode(errors="replace")
    if not _ANY.search(alike) or NOISE.search(text):
        return _LineKind()
    rows = tuple(row for row, keys in _KEYS if any(key in text for key in keys))
    return _LineKind(any(word in text for word in _SPECIAL), rows)


@lru_cache(1 << 12)
def _says_survived(line: str) -> bool:
    return SURVIVED.search(line) is not None


@lru_cache(1 << 12)
def _list_rows(error: str) -> list[Row]:
    """The rows that may fit an exception, by its text without digits."""
    rows = (row for row in ROWS if row.level not in {RECORD, RESTART})
    return [row for row in rows if row is _ALONE or any(key in error for key in row.key.split("|"))]


def _find_row(error: str) -> Row | None:
    return next((row for row in _list_rows(error.translate(_NO_DIGITS)) if row.match(error)), None)


def _split_labels(line: str) -> tuple[str, str]:
    """The line without the labels that say whose it is, and those."""
    prefix = ""
    while (found := _PREFIX.match(line, len(prefix))) is not None:
        prefix += found[0]
    return line[len(prefix) :].strip(), prefix


def _is_logged(before: str) -> bool:
    """The line in front of a traceback is a logger's, of an error."""
    text = before.split("\r")[-1]
    return not _FRAME.search(text) and find_time(text.encode()) is not None and _LEVEL.search(text) is not None


def _read_groups(match: re.Match[str] | None) -> dict[str, int]:
    """Rank, signal and status as numbers."""
    found: dict[str, int] = {}
    for name, text in (match.groupdict() if match is not None else {}).items():
        base = name.removesuffix("_too")
        if text is None or base not in {"rank", "signal", "status"}:
            continue
        number = int(text) if text.lstrip("-").isdecimal() else _SIGNALS.get(text, _SIGNALS.get(text.lower()))
        if number is not None:
            found[base] = number
    return found


def _read_ranks(match: re.Match[str] | None) -> tuple[int, ...]:
    """Of `Ranks 1, 2 failed` and of `tasks 0-1,4` all."""
    groups = match.groupdict() if match is not None else {}
    if groups.get("rank") is None:
        return ()
    found: list[int] = []
    for word in f"{groups['rank']}{groups.get('more') or ''}".replace(" ", "").split(","):
        first, _, last = word.partition("-")
        if first.isdecimal() and len(last) < 7:
            found += range(int(first), int(last or first) + 1)
    return tuple(found)
