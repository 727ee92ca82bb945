"""The lines that programs print in a log besides their errors, and which of the errors they survived."""

from __future__ import annotations

import re
from collections import Counter

from hpcddp.diagnose.rows import CAUSE, CLUSTER, END, LATE, LOST, NOISE, RAISED, REQUEST, SENDER, WEAK
from hpcddp.record import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpcddp.diagnose.reading import Log, Mark

#: How lines of launchers, schedulers and tracebacks begin.
_OTHERS = re.compile(
    rb"(?:(?:\[[\w,@-]+\](?:<std\w+>)?:?|\d+:)(?: |(?=\S)))?"
    rb"(?:\s|\[rank\d|Traceback|During handling|The above|srun: |slurmstepd|hpcddp: |hint: |[-=*]{5}|frame #|=   "
    rb"|(?:prterun|mpirun) detected |thus causing|the job to be terminated|Primary job |a non-zero exit code"
    rb"|\[?[EWI]\d{4} [\d:.]+ (\d+ )?(torch/|\w+\.cpp)|<omitting|Exception raised|Thread 0x|\S+: line \d+: .*not found)"
)
#: What a program's last line says of its end.
_DONE = re.compile(r"(?i)\b(done|finish(ed|ing)?|completed?|bye|ok|success\w*|ended|end|saved|reached)\b")
_FULL = re.compile(r"\b100 ?%|(?<![\[(])(?<!MEMBER: )\b(?P<all>[1-9]\d*) ?(/|of) ?(?P=all)\b")
_NUMBERS = re.compile(rb"\d+(\.\d+)?(e[+-]?\d+)?|[^\w\s]{2,}")  # and bars
_BEHIND = 3000  # lines, of those behind an exception and of those at the end, that are looked at


def forget_caught(log: Log) -> None:
    """Remove the errors without torch's `[rank1]:` after which the program went on.

    It did if behind the last of them a line, numbers apart, comes more often than there are ranks, or more than once
    where the ends that the launcher reports have another reason. Each rank ends once: of more exceptions than ranks,
    those that all ranks raised and the earliest were caught.
    """
    last = {_key(mark): mark.number for mark in log.marks if not mark.is_signed and _may_be_caught(mark)}
    if not last:
        return
    ends = [mark for mark in log.marks if mark.level == END and (mark.signal or mark.status is not None)]
    lost = {mark.rank for mark in log.marks if mark.level == LOST and mark.is_signed}
    is_explained = bool(ends) and all(end.signal or end.status != 1 or end.rank in lost for end in ends)
    size = max(log.world_size, *(rank + 1 for end in ends for rank in end.ranks), 1)
    progress = find_progress(log, min(last.values()), 1 if is_explained else size)
    over = {key for key, number in last.items() if number < progress}
    times = Counter(_key(mark) for mark in log.marks if mark.is_raised and mark.level == RAISED and not mark.is_signed)
    total = 0
    for key in sorted(times, key=lambda one: (times[one] >= size, -last[one])) if size > 1 else ():
        if total > 0 and total + times[key] > size:
            over.add(key)
        total += times[key]
    log.marks = [mark for mark in log.marks if mark.is_signed or _key(mark) not in over]


def _may_be_caught(mark: Mark) -> bool:
    """A program may go on after it: an exception, a message of the program, a lost rank."""
    if mark.row is None or mark.level in {RAISED, LATE} or (mark.is_raised and mark.level == LOST):
        return True
    is_weak = mark.level == WEAK and mark.cause != "singletons" and "\n" not in mark.body
    return (is_weak or mark.level == CAUSE) and mark.row.whose not in {CLUSTER, REQUEST, SENDER}


def _key(mark: Mark) -> str:
    return mask_numbers(mark) + mark.frame


def find_progress(log: Log, behind: int, times: int) -> int:
    """The last line that, numbers apart, comes more than `times` times behind line `behind`; 0: none."""
    first, marked = behind - log.skipped, {mark.number for mark in log.marks} | log.passed
    found: dict[bytes, list[int]] = {}
    ends = range(len(log.lines))[first:]
    for at in sorted({*ends[:_BEHIND], *ends[-_BEHIND:]}):
        for piece in log.lines[at].split(b"\r") if at + 1 + log.skipped not in marked else ():
            if _is_program_line(piece):
                found.setdefault(_NUMBERS.sub(b"#", piece), []).append(at + 1 + log.skipped)
    often = [some for shape, some in found.items() if len(some) > times and re.search(rb"[A-Za-z]{2}", shape)]
    return max((some[-times - 1] for some in often), default=0)


def list_program_lines(log: Log, before: int) -> list[tuple[int, str]]:
    """The last lines of programs before line `before`, with their numbers."""
    stop = before - 1 - log.skipped
    found = []
    for at in range(max(stop - _BEHIND, 0), stop):
        if at + 1 + log.skipped not in log.passed and _is_program_line(log.lines[at]):
            found.append((at + 1 + log.skipped, log.lines[at].split(b"\r")[-1].decode(errors="replace").strip()))
    return found


def is_done(logs: Sequence[Log], size: int) -> bool:
    """Each log shows that its work was done: by status 0, a full counter in the last line, or a word such as "done" in
    one of the last lines that does not come more often than there are ranks (`size`)."""
    is_shown = any(log.exit_status == 0 for log in logs)
    for log in (log for log in logs if log.exit_status != 0):
        lines = [line for _, line in list_program_lines(log, len(log.lines) + log.skipped + 1) if line]
        shapes = [_NUMBERS.sub(b"#", line.encode()) for line in lines]
        counts = Counter(shapes)
        few = range(len(lines))[-size - 3 :]
        says = any(counts[shapes[at]] <= max(size, 1) and _DONE.search(lines[at]) for at in few)
        if lines and not says and not _FULL.search(lines[-1]):
            return False
        is_shown |= bool(lines)
    return is_shown


def _is_program_line(line: bytes) -> bool:
    """The line is neither a launcher's, nor a traceback's, nor noise."""
    return not _OTHERS.match(line) and not NOISE.search(line.decode(errors="replace"))


def mask_numbers(mark: Mark) -> str:
    return re.sub(r"/(?:dev/shm|tmp)/\S+|0x[0-9a-f]+|\d+", "#", mark.body)
