"""Reads a log: the lines that a row fits, with their ranks, and the exceptions that tracebacks end with.

Few lines of a log are unlike all others. A line is compared with the rows by what it has beside digits, once for all
lines that are alike.
"""

from __future__ import annotations

import os
import re
from collections import Counter

from hpcddp.diagnose.progress import forget_caught
from hpcddp.diagnose.rows import CAUSE, END, LOST, NOISE, RAISED, RECORD, RESTART, ROWS, WEAK, Row
from hpcddp.errors import RequestError
from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.runs.failure import EXCEPTION, TRACEBACK, Traceback, find_prefix
from hpcddp.runs.logs import LogFile, find_time
from hpcddp.signals import name_signal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_MOST = 1 << 28  # bytes of one file, from its end
_LONGEST = 1 << 16  # bytes of a line, at its begin and at its end, that are looked at
_DIGITS = b"0123456789"
_PLAIN = TRACEBACK.encode() + b":"
_LATER = ("During handling of the above exception", "was the direct cause of the following")
#: How an exception follows from the one above it.
FIRST, RERAISED, ACCIDENT = "first", "reraised", "accident"
#: What stands in front of a traceback that ends nothing.
_IGNORED = ("Exception ignored in", "Logging error", "Exception in thread", "atexit")
_LEVEL = re.compile(r"\b(ERROR|WARN\w*|CRITICAL|EXCEPTION)\b")
_OF_LAUNCHER = re.compile(rb"\s*$|srun: |slurmstepd|hpcddp: |hint: ")  # which may speak after ranks are started again
#: What counts the attempts of a job script that tries again, or of a job that is queued again.
_COUNTED = re.compile(rb"(?i)\b(attempt|try|retry|restart(?: count)?)\b\W{0,3}(\d{1,3})\b(?!.*(fail|giv))")
#: What a program says of an error that it goes on after.
SURVIVED = re.compile(
    r"(?i)\bwill retry|retrying|trying again|ignor(ed|ing)\b|fall(ing|s)? ?back|(go(es|ing)|carry(ing)?) on\b"
    r"|\b(continu(es|ing)|instead|without it)\b|\bus(e|ing) (the |its |a )?(default|built|slow)"
    r"|(default|built-in)\w*\b.*\b(used|taken)\b|(?-i:\bWARN(ING)?\b)|\"warn(ing)?\""
)
_EXIT = re.compile(
    r"(?i)\bexit(?:ed)?(?: with)?[ _](?:status|code)\W{0,3}(\d{1,3})\b|\b(?:status|rc)[ =]\(?(\d{1,3})\)?\s*$"
)
_FRAME = re.compile(r'File "(.+?)", line (\d+), in (\S+)')
_OFTEN = 200  # times that an exception is caught by a program that goes on after it
_INSIDE = re.compile(rb'File ".+", line \d+, in (?!<module>|_run_|_bootstrap|_worker_loop)')
_LOADS = re.compile(r"torch/serialization\.py\", line \d+, in (load|_load|_legacy_load)$")
_LIBRARY = re.compile(r"(site|dist)-packages/|/lib/python\d|<frozen|<string>|/bin/(torchrun|accelerate)$")
_WORLD = re.compile(
    rb"[Rr]ank\W{0,3}\d+\s?(?:of|/)\s?(\d+)\b|initiali[sz]ed \d+ of (\d+)\b|hpcddp: (\d+) ranks on"
    rb"|world.?size\W{1,3}(\d+)\b|\b(\d+) (?:processes|ranks)\b"
    rb"|Starting with (\d+) processes|\bnranks (\d+)|MEMBER: \d+/(\d+)|\d/(\d+) clients joined"
)
_SAMPLE = 100_000  # bytes, in which ranks that are numbers without a name, and how many there are, are looked for
#: What begins a line, or stands in it, and says whose it is.
_PREFIX = re.compile(
    r"(?:\[(?:rank|default|trainer|worker)[ :]?(\d+)\]:? ?|\[(\d+)\]:? (?=\S)|(\d{1,5}): (?=\S)"
    r"|\[\d+,(\d+)\]<std\w+>: ?|\[\S+@\d+,(\d+)\]<std\w+>: ?)"
)
_LABEL = re.compile(
    rb"\[[Rr]ank[ :=]?(\d+)\]|^\[[^\]]*\]\[(\d{1,5})\]\[|^\[(\d+)\]:? (?=\S)|^(\d{1,5}): (?=\S)"
    rb"|^\[\d+,(\d+)\]<std|^\[\S+@\d+,(\d+)\]<std|^[(<](\d+)[)>] |\b[Rr]ank\W{0,4}(\d+)\b|\bworker[-_](\d+)\b"
    rb"|(?:^|[ \[(|])r(\d{1,4})[\])|: ]|[\[(]R(\d{1,4})[\])]"
)
_TORCH = re.compile(rb"\[rank\d+\]:")  # torch's, in front of what ends a rank
_SIGNED = re.compile(r"\[rank\d+\]:")
_SPAWNED = re.compile(r"^-- Process (\d+) terminated with the following error:")
_ERROR_LEVEL = re.compile(rb"\b(ERROR|CRITICAL|FATAL|Error|error:)")
_NAMED = re.compile(rb"ank[ :=]?(\d+)\b")
_MOST_RANKS = 1_000_000
_OF_FILE = re.compile(r"(?:rank|task|proc)[-_.]?0*(\d+)\b|attempt_\d+/(\d+)/std(?:out|err)\.log$")
LOG_NAME = re.compile(r"\.(out|err|log|txt)$|\.[oe]\d+(\.\d+|-\d+)?$")
_REPORT = re.compile(r"hpcddp: rank (\d+) on ([\w.-]+) .* The end of its output:")
_KILLS = {4, 6, 7, 8, 9, 11, 15}
_SIGNALS = {name_signal(number): number for number in range(1, 32)} | {
    "hangup": 1, "interrupt": 2, "quit": 3, "illegal instruction": 4, "aborted": 6, "bus error": 7, "killed": 9,
    "floating point exception": 8, "segmentation fault": 11, "terminated": 15, "file size limit exceeded": 25,
    "trace/breakpoint trap": 5, "user defined signal 1": 10, "user defined signal 2": 12, "broken pipe": 13,
    "alarm clock": 14, "cpu time limit exceeded": 24, "bad system call": 31,
}  # fmt: skip


class Mark(Record):
    """A line that says something. `row`: None of an exception that no row names. `number`: its line, from 1. `level`:
    that of its row, or of its place. `frame`: the innermost line of the program in its traceback. `chain`: of
    exceptions of which one led to the other. `is_quoted`: whether it stands
    in a report of hpcddp's."""

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
    ranks: tuple[int, ...] = ()
    link: str = ""

    @property
    def cause(self) -> str:
        """Its class."""
        return self.row.cause if self.row is not None else "exception"

    @property
    def is_signed(self) -> bool:
        """Whether torch says whose it is, as it does of an exception that ends a rank of a process group."""
        return self.is_raised and _SIGNED.search(self.text) is not None


class Log:
    """One file. `ranks`: those that have printed something with their number."""

    def __init__(self, number: int, source: LogFile, text: bytes, skipped: int) -> None:
        self.number, self.source, self.skipped = number, source, skipped
        self.lines = text.split(b"\n")
        self.marks: list[Mark] = []
        self.exit_status: int | None = None
        self.passed = set[int]()  # the last lines of tracebacks that ended nothing
        labels = (_LABEL.search(line) for line in (text[:_SAMPLE] + text[-_SAMPLE:]).split(b"\n"))
        self.ranks = {*_read_number({*_NAMED.findall(text)})}
        self.ranks |= {rank for label in labels if label is not None for rank in _read_number(label.groups())}
        sizes = [size for found in _WORLD.findall(text[:_SAMPLE]) for size in _read_number(found)]
        self.world_size = max((size for size in sizes if size < _MOST_RANKS), default=0)

    def find_time(self, number: int) -> float:
        """When the line was printed, at the earliest: by the last time in or before it; 0: none is near."""
        at = number - 1 - self.skipped
        for line in reversed(self.lines[max(at - 60, 0) : at + 1]):
            if (time := find_time(line)) is not None:
                return time
        return 0.0

    def find_rank(self, line: str) -> int | None:
        """Whose the line is, by what it begins with or says."""
        label = _LABEL.search(line.encode())
        return next(iter(_read_number(label.groups())), None) if label is not None else self.source.rank


def _read_number(groups: Iterable[bytes | str | None]) -> list[int]:
    """The number of a match's groups, of which one has matched."""
    return [int(text) for text in groups if text and len(text) < 7]


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
    if os.path.exists(source.path) and not os.path.isfile(source.path):
        raise RequestError(f"{source.path} is no file", "name the job's output: hpcddp diagnose FILE …")
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
    lines = text.split(b"\n")
    long = (line if len(line) <= 2 * _LONGEST else line[:_LONGEST] + b" ... " + line[-_LONGEST:] for line in lines)
    text = b"\n".join(long)
    log = Log(number, source, text, skipped)
    _LogReader(log).read(text)
    said = {mark.number for mark in log.marks}
    log.marks = _choose_of_chains(log.marks)
    log.passed |= said - {mark.number for mark in log.marks}
    log.world_size = max(log.world_size, *(rank + 1 for rank in log.ranks), 0) if log.ranks else log.world_size
    forget_caught(log)
    return log


def _choose_of_chains(marks: list[Mark]) -> list[Mark]:
    """One of the exceptions that led to one another: what a handler ran into does not count; of those that were raised
    in place of others the first that a row names, else the last."""
    chains: dict[int, list[Mark]] = {}
    for mark in marks:
        chains.setdefault(mark.chain or -id(mark), []).append(mark)
    chosen = []
    for chain in chains.values():
        if len(chain) == 1 and chain[0].is_logged >= chain[0].is_caught:
            chosen += chain
            continue
        meant: list[Mark] = []
        for mark in chain:
            if mark.link == ACCIDENT and meant:
                break
            meant = [mark] if mark.link == FIRST else [*meant, mark]
        named = [mark for mark in meant if mark.row is not None]
        causes = [mark for mark in named if mark.level in {CAUSE, RAISED}]
        best = next(iter([*causes, *named]), meant[-1])
        chosen.append(best._replace(is_logged=best.is_logged or chain[-1].is_caught))
    return sorted(chosen, key=lambda mark: mark.number)


def _choose_rows(keys: Iterable[str]) -> str:
    """A pattern that finds any of the words, by their common beginnings."""
    root: dict[str, dict[str, object]] = {}
    for key in keys:
        level: dict[str, object] = root  # type: ignore[assignment]
        for letter in key:
            level = level.setdefault(letter, {})  # type: ignore[assignment]
        level[""] = {}

    def write(level: dict[str, object]) -> str:
        if "" in level:
            return ""
        each = [re.escape(letter) + write(below) for letter, below in sorted(level.items())]  # type: ignore[arg-type]
        return each[0] if len(each) == 1 else f"(?:{'|'.join(each)})"

    return write(root)  # type: ignore[arg-type]


_SPECIAL = (TRACEBACK, *_LATER, "exit", "status", "rc=", "The end of its output", "hint: ")
_ALONE = next(
    row for row in ROWS if row.level == WEAK and re.search(r"\d", row.key)
)  # lines are compared without their digits
_KEYS = [(row, row.key.split("|")) for row in ROWS if row.level != RECORD and row is not _ALONE]
_REFUSED = next(row for row in ROWS if row.shows == "hpcddp: …, with a hint")
_ANY = re.compile(_choose_rows({*_SPECIAL, *(key for _, keys in _KEYS for key in keys)}).encode())


class _LineKind(Record):
    """What is known of lines that differ in digits alone: whether they say something, and what rows they may fit."""

    says: bool
    is_special: bool
    rows: tuple[Row, ...]


_NOTHING = _LineKind(False, False, ())


class _Open(Traceback):
    """A traceback that has not come to its exception."""

    def __init__(
        self, begin: int, prefix: str, rank: int | None, chain: int, *, is_logged: bool, is_ignored: bool
    ) -> None:
        super().__init__(prefix)
        self.begin, self.rank, self.chain = begin, rank, chain
        self.is_logged, self.is_ignored = is_logged, is_ignored
        self.link = ""

    def was_caught(self) -> bool:
        """Whether the traceback does not begin where its program, process or thread began."""
        return bool(self.frames) and self.link != FIRST and _INSIDE.search(self.frames[0].encode()) is not None

    def find_frame(self, known: dict[str, str]) -> str:
        """The innermost line of the program, as `train.py:12`. `known`: those of tracebacks before."""
        key = "".join(self.frames)
        if key not in known:
            found = (frame for text in reversed(self.frames) if (frame := _FRAME.search(text)))
            own = (f"{os.path.basename(at[1])}:{at[2]}" for at in found if not _LIBRARY.search(at[1]))
            known[key] = next(own, "")
        return known[key]


class _LogReader:
    """Goes through the lines of one log."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._known: dict[bytes, _LineKind] = {}  # by the line without digits
        self._rows: dict[str, Row | None] = {}  # of exceptions, by their text
        self._frames: dict[str, str] = {}  # by the lines of a traceback
        self._times = Counter[str]()  # how often an exception was caught
        self._bodies = set[str]()  # of exceptions after which the program said that it goes on
        self._survived: dict[bytes, bool] = {}  # by a line near a traceback, without digits
        self._open: list[_Open] = []
        self._restarts: list[int] = []  # lines
        self._exit_at = 0
        self._chains = 0
        self._last: tuple[str, int, Mark | None] = ("", 0, None)  # the last exception: its prefix, its line
        self._chained = ""  # the prefix of a traceback that follows from the last one
        self._link = ""  # how it does
        self._above: list[str] = []  # the frames of the last traceback
        self._is_quoted = False  # the line that is looked at
        self._quoted: tuple[int, str] | None = None  # the rank, and host, of lines that a report of hpcddp's quotes

    def read(self, text: bytes) -> None:
        """Fill the log."""
        known = self._known
        begin = text[:_SAMPLE]
        alone = {begin.count(b"\n", 0, found.start()) for found in re.finditer(_ALONE.pattern.encode(), begin)}
        after, is_begin = 0, True
        for at, line in enumerate(self._log.lines):
            if at < after:
                continue
            if line == _PLAIN and not self._open and (after := self._skip_survived(at)):
                continue
            if at in alone:
                self._look(at, line, _LineKind(says=True, is_special=False, rows=(_ALONE,)))
                continue
            for piece in line.split(b"\r") if b"\r" in line else (line,):
                alike = piece.translate(None, _DIGITS)
                kind = known.get(alike) or self._classify(alike)
                known[alike] = kind
                if self._open and piece[:1] == b" " and not (self._open[-1].prefix or kind.is_special or self._quoted):
                    if b'File "' in piece:
                        self._open[-1].frames.append(piece.decode(errors="replace"))
                    continue
                is_begin = is_begin and piece[:2] in {b"  ", b""}
                if not self._open and b'File "' in piece and (is_begin or piece[:5] == b"[rank"):
                    self._open_cut(at, piece)
                if kind.says or self._open or self._quoted:
                    self._look(at, piece, kind)
        self._forget_attempts(text)
        self._log.marks = [mark for mark in self._log.marks if not (mark.is_caught and mark.body in self._bodies)]

    def _forget_attempts(self, text: bytes) -> None:
        """Remove what was said before the last attempt began. One begins with the word that ranks are started again
        and what the launcher says then, and with a line that counts attempts, if a launcher has told of an end since
        the line with the number before."""
        lines, skipped, over = self._log.lines, self._log.skipped, 0
        for number in self._restarts:
            below = lines[number - skipped :]
            over = number + next((nth for nth, line in enumerate(below) if not _OF_LAUNCHER.match(line)), 0)
        ends = [mark.number for mark in self._log.marks if mark.level == END or "ChildFailed" in mark.body]
        before: dict[bytes, tuple[int, int]] = {}
        at, place = 1 + skipped, 0
        for found in _COUNTED.finditer(text) if ends else ():
            word, count = found[1], found[2]
            at, place = at + text.count(b"\n", place, found.start()), found.start()
            number, last = before.get(key := word.lower(), (-1, at if key[:2] != b"re" else 0))
            if int(count) > number and any(last < end < at for end in ends):
                over = max(over, at)
            if int(count) > number:
                before[key] = int(count), at
        self._log.exit_status = self._log.exit_status if self._exit_at > over else None
        self._log.marks = [mark for mark in self._log.marks if mark.number > over]

    def _open_cut(self, at: int, line: bytes) -> None:
        """Open a traceback whose first lines are cut off, if the line is one of its frames: torch's, which say so
        themselves, and at the begin of a log."""
        body, prefix = self._strip(line.decode(errors="replace").rstrip())
        if _FRAME.match(body):
            labelled = _PREFIX.match(prefix)
            rank = next(iter(_read_number(labelled.groups())), None) if labelled else self._log.source.rank
            self._open.append(_Open(at, prefix, rank, self._new_chain(), is_logged=False, is_ignored=False))

    def _is_survived(self, line: bytes) -> bool:
        """Whether a line near a traceback says that the program goes on."""
        alike = line[-1000:].translate(None, _DIGITS)
        if alike not in self._survived:
            self._survived[alike] = SURVIVED.search(alike.decode(errors="replace")) is not None
        return self._survived[alike]

    def _is_passed(self, one: _Open, at: int) -> bool:
        """Whether the line in front of a traceback, or one right behind it, says that the program goes on."""
        behind = self._log.lines[at + 1 : at + 3]
        if any(word.encode() in line for word in _LATER for line in behind):
            return False
        near = [*self._log.lines[max(one.begin - 1, 0) : one.begin], *behind]
        ranks = ((line, self._log.find_rank(line.decode(errors="replace"))) for line in near)
        return any(self._is_survived(line) for line, rank in ranks if one.rank is None or rank in {None, one.rank})

    def _skip_survived(self, at: int) -> int:
        """The place behind a traceback that begins here, does not begin where its program began, and was survived
        before or stands behind a line which says that the program goes on; 0: it is none."""
        lines = self._log.lines
        if not at or not _INSIDE.search(b"".join(lines[at + 1 : at + 2])):
            return 0
        end = next((n for n in range(at + 1, len(lines)) if lines[n][:1] != b" "), at)
        body = lines[end].decode(errors="replace").strip()
        if body not in self._bodies and not self._is_survived(lines[at - 1]):
            return 0
        self._pass(end, body)
        return end + 1

    def _pass(self, at: int, body: str) -> None:
        """Note a traceback's last line that the program went on after: other ranks did so, too."""
        self._log.passed.add(at + 1 + self._log.skipped)
        self._bodies.add(body)

    def _classify(self, alike: bytes) -> _LineKind:
        if not _ANY.search(alike):
            return _NOTHING
        text = alike.decode(errors="replace")
        if NOISE.search(text):
            return _NOTHING
        rows = tuple(row for row, keys in _KEYS if any(key in text for key in keys))
        is_special = any(word in text for word in _SPECIAL)
        return _LineKind(bool(rows) or is_special, is_special, rows)

    def _look(self, at: int, piece: bytes, kind: _LineKind) -> None:
        line = piece.decode(errors="replace").rstrip()
        rank, host = self._log.source.rank, self._log.source.host
        self._is_quoted = False
        if self._quoted is not None:
            if line.startswith("    ") or not line.strip():
                self._is_quoted = True
                rank, host = self._quoted
                line = line[4:]
            else:
                self._quoted = None
        if kind.is_special and self._look_at_special(at, line, rank):
            return
        if self._open and self._go_on(at, line, rank, host):
            return
        if not kind.rows:
            return
        body, prefix = self._strip(line)
        for row in kind.rows:
            match = row.match(body)
            if match is not None and row.level in {RAISED, WEAK} and SURVIVED.search(body):
                return
            if match is not None:
                labelled = _PREFIX.match(prefix) or (_LABEL.search(piece) if rank is None else None)
                rank = next(iter(_read_number(labelled.groups())), rank) if labelled is not None else rank
                self._add(at, line, body, row, match, rank, host, prefix)
                return

    def _look_at_special(self, at: int, line: str, rank: int | None) -> bool:
        """Whether the line is of a traceback, or says nothing else."""
        if "hpcddp: rank " in line and (report := _REPORT.search(line)):
            self._quoted = int(report[1]), report[2]
            return False
        if f"{TRACEBACK}:\\n" in line:  # a field of a JSON line
            lines = line.partition(TRACEBACK)[2].replace('\\"', '"').split("\\n")
            one = _Open(at, "", self._log.find_rank(line), self._new_chain(), is_logged=True, is_ignored=False)
            one.frames = [text for text in lines if 'File "' in text]
            if (
                not SURVIVED.search(line)
                and (found := EXCEPTION.match(re.sub(r'"?[,}\]]*$', "", lines[-1]))) is not None
            ):
                self._end(at, line, found[0], one, rank, self._log.source.host)
            return True
        if TRACEBACK in line:
            whole = line.partition(TRACEBACK)[0]
            is_original, is_group = whole.endswith("Original "), whole.endswith("+ Exception Group ")
            head = whole.removesuffix("Original ").removesuffix("+ Exception Group ")
            ranked = re.search(r"(\[rank(\d+)\]:? ?)$", head) if "[rank" in head else None
            prefix = ranked[1] if ranked is not None else ""
            if ranked is None and (labelled := _PREFIX.match(head)):
                prefix, rank = labelled[0], next(iter(_read_number(labelled.groups())), rank)
            if ranked is not None:
                rank = int(ranked[2])
            below = b"".join(self._log.lines[at + 1 : at + 2]).decode(errors="replace")
            prefix = find_prefix(head, below) or prefix
            if is_group:  # whose own lines are behind a bar
                prefix = f"{head}| "
            before = self._log.lines[at - 1].decode(errors="replace") if at else ""
            is_logged = ranked is None and self._is_logged(before) and not is_original
            if ranked is None and (spawned := _SPAWNED.match(before)) is not None:
                rank = int(spawned[1])
            if is_logged and rank is None and (label := _LABEL.search(before.encode())):
                rank = next(iter(_read_number(label.groups())), rank)
            follows = self._chained == prefix.strip() + "|" or is_original or "The above" in before
            chain = self._last[2].chain if follows and self._last[2] is not None else self._new_chain()
            is_ignored = any(word in before for word in _IGNORED)
            self._open.append(_Open(at, prefix, rank, chain, is_logged=is_logged, is_ignored=is_ignored))
            self._open[-1].link = FIRST if is_original else self._link if follows else ""
            self._chained = ""
            return True
        if any(word in line for word in _LATER):
            self._chained = self._strip(line)[1].strip() + "|"
            self._link = ACCIDENT if _LATER[0] in line else RERAISED
            return True
        if "hint: " in line and self._look_at_hint(at, line, rank):
            return True
        if "xit" in line or "status" in line or "rc=" in line:
            for found in _EXIT.finditer(line):
                self._log.exit_status, self._exit_at = int(found[1] or found[2]), at + 1 + self._log.skipped
        return False

    def _look_at_hint(self, at: int, line: str, rank: int | None) -> bool:
        """Whether the line is the hint of an error of hpcddp's, whose first line indented ones may continue."""
        body, prefix = self._strip(line)
        if not body.startswith("hint: "):
            return False
        for above in range(at - 1, max(at - 20, -1), -1):
            text = self._log.lines[above].decode(errors="replace").rstrip()[4 if self._is_quoted else 0 :]
            first, label = self._strip(text)
            if label.strip() != prefix.strip():
                break
            if text[len(label) :].startswith(" "):
                continue
            whole = f"{first}\n{body}"
            match = _REFUSED.match(whole) if not _REPORT.search(first) else None
            if match is not None:
                labelled = _PREFIX.match(prefix)
                rank = next(iter(_read_number(labelled.groups())), rank) if labelled is not None else rank
                host = self._quoted[1] if self._is_quoted and self._quoted is not None else self._log.source.host
                self._add(above, text, whole, _REFUSED, match, rank, host, prefix)
            break
        return True

    def _new_chain(self) -> int:
        self._chains += 1
        return self._log.number * 1_000_000 + self._chains

    @staticmethod
    def _is_logged(before: str) -> bool:
        """Whether the line in front of a traceback is a logger's, or a program's own that says what it does then."""
        text = before.split("\r")[-1]
        if not text.strip() or _FRAME.search(text):
            return False
        return find_time(text.encode()) is not None and _LEVEL.search(text) is not None

    def _strip(self, line: str) -> tuple[str, str]:
        """The line without what says whose it is, and that."""
        prefix = ""
        while (found := _PREFIX.match(line, len(prefix))) is not None:
            prefix += found[0]
        return line[len(prefix) :].strip(), prefix

    def _go_on(self, at: int, line: str, rank: int | None, host: str) -> bool:
        """Whether the line belongs to an open traceback."""
        for one in reversed(self._open):
            if not one.add(line):
                continue
            if one.error:
                self._open.remove(one)
                self._end(at, line, one.error, one, rank, host)
            return True
        return False

    def _end(self, at: int, line: str, body: str, one: _Open, rank: int | None, host: str) -> None:
        if one.is_ignored:
            return
        said = f"{body} (torch.load)" if any(_LOADS.search(frame) for frame in one.frames) else body
        if said not in self._rows:
            fits = (row for row in ROWS if row.level not in {RECORD, RESTART} and row.match(said))
            self._rows[said] = next(fits, None)
        row = self._rows[said]
        if "CalledProcessError" in body and "[rank" in one.prefix:  # no launcher's, but a rank's
            row = None
        is_caught = one.was_caught() and "[rank" not in one.prefix
        self._times[body] += is_caught
        if is_caught and (self._times[body] > _OFTEN or self._is_passed(one, at)):
            self._pass(at, body)
            return
        level = RAISED if row is None or row.level in {CAUSE, RAISED} else row.level
        match = row.match(body) if row is not None else None
        rank = one.rank if one.rank is not None else 0 if "clients joined" in body else rank  # whom the others call
        named = _read_groups(match)
        whose = named.get("rank", rank) if level in {RAISED, CAUSE, END} else rank
        mark = Mark(
            row, level, self._log.number, at + 1 + self._log.skipped, line.strip(), body, whose, host,
            named.get("signal", 0), frame=one.find_frame(self._frames), chain=one.chain, is_raised=True,
            is_logged=one.is_logged, is_caught=one.was_caught(),
            ranks=_read_ranks(match), is_quoted=self._is_quoted,
            link=self._find_link(one, at),
        )  # fmt: skip
        self._above = one.frames
        self._log.marks.append(mark)
        self._last = one.prefix.strip(), at, mark

    def _find_link(self, one: _Open, at: int) -> str:
        """An exception that was raised while another was handled is meant to be in its place if the function that
        caught the one raises the other; else the handler failed."""
        if one.link != ACCIDENT or not one.frames or not self._above:
            return one.link
        place = [(found[1], found[3]) for text in (one.frames[-1], self._above[0]) if (found := _FRAME.search(text))]
        last = one.frames[-1].strip().encode()
        lines = self._log.lines[one.begin : at]
        source = next((n + 1 for n in range(len(lines) - 2, -1, -1) if last in lines[n]), 0)
        is_raise = b"raise " in lines[source] if source else False
        return RERAISED if is_raise and len({*place}) == 1 else ACCIDENT

    def _add(
        self, at: int, line: str, body: str, row: Row, match: re.Match[str], rank: int | None, host: str, prefix: str
    ) -> None:
        if row.level == RESTART:
            self._restarts.append(at + 1 + self._log.skipped)
            return
        named = _read_groups(match)
        last_prefix, last_at, last = self._last
        is_near = last is not None and 0 < at - last_at <= 12 and prefix.strip() == last_prefix
        between = self._log.lines[last_at + 1 : at + 1] if is_near else []
        is_detail = is_near and (prefix or not any(_LABEL.search(one) or find_time(one) for one in between))
        signal, status = named.get("signal", 0), named.get("status")
        if status is not None and status < 0:
            signal, status = -status, None
        if row.level == END and "first observed" in body:
            rank, host, signal, status = self._read_root_cause(at)
        elif row.level == END and body.startswith("exitcode"):
            above = b"\n".join(self._log.lines[max(at - 2, 0) : at]).decode(errors="replace")
            listed = re.search(r"rank +: (\d+)", above)
            rank = int(listed[1]) if listed is not None else rank
        elif row.level == END and "noticed that process" in body and not signal:  # Open MPI 5 breaks the line
            below = b" ".join(self._log.lines[at + 1 : at + 2]).decode(errors="replace")
            if (found := re.match(r"signal (\d+)", below.strip())) is not None:
                signal, line, at = int(found[1]), below, at + 1
        elif row.level == END and any(word in body for word in ("EXIT STRING", "KILLED BY SIGNAL", "EXIT CODE")):
            rank, host = self._read_hydra(at, rank, host)
            if "EXIT CODE" in body and status in _KILLS:  # of MPICH, whose string below may be cut off
                signal, status = status, None
        if "EXIT STRING" in body:  # which says more than the code above it
            near = range(at + self._log.skipped - 7, at + self._log.skipped + 1)
            marks = self._log.marks
            self._log.marks = [one for one in marks if "EXIT CODE" not in one.body or one.number not in near]
        host = match.groupdict().get("host") or match.groupdict().get("host_too") or host
        mark = Mark(
            row, row.level, self._log.number, at + 1 + self._log.skipped, line.strip(), body,
            named.get("rank", rank), host, signal, status, ranks=_read_ranks(match), is_quoted=self._is_quoted,
        )  # fmt: skip
        if is_detail and last is not None and row.level in {RAISED, LOST}:
            mark = mark._replace(chain=last.chain, is_raised=True, rank=last.rank)
            mark = mark._replace(is_logged=last.is_logged, is_caught=last.is_caught)
        self._log.marks.append(mark)

    def _read_root_cause(self, at: int) -> tuple[int | None, str, int, int | None]:
        """torchrun's word on the rank that it saw end first."""
        below = b"\n".join(self._log.lines[at : at + 12]).decode(errors="replace")
        rank, host = re.search(r"rank +: (\d+)", below), re.search(r"host +: (\S+)", below)
        code = re.search(r"exitcode +: (-?\d+)", below)
        status = int(code[1]) if code else None
        killed = status is not None and status < 0
        return (
            int(rank[1]) if rank else None,
            host[1] if host else "",
            -(status or 0) if killed else 0,
            None if killed else status,
        )

    def _read_hydra(self, at: int, rank: int | None, host: str) -> tuple[int | None, str]:
        """The rank of a process that MPICH and Intel MPI name: by its number, and else by its PID in NCCL's lines."""
        above = b"\n".join(self._log.lines[max(at - 8, 0) : at]).decode(errors="replace")
        found = re.search(r"RANK (\d+) PID", above)
        where = re.search(r"PID (\d+) RUNNING AT (\S+)", above)
        host = where[2] if where else host
        if found is not None:
            return int(found[1]), host
        if where is not None and rank is None:
            text = b"\n".join(self._log.lines[:4000])
            pids = sorted({int(pid) for pid in re.findall(rb"^\S+?:(\d+):\1 \[\d+\] NCCL", text, re.MULTILINE)})
            if int(where[1]) in pids and len(pids) == max(self._log.world_size, max(self._log.ranks, default=0) + 1):
                return pids.index(int(where[1])), host  # a launcher starts the ranks of a node in their order
        return rank, host


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
