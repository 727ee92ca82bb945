"""The first cause among a job's marked lines, and the rank at fault.

In this order: the first exception of a rank, or message of the scheduler, the kernel or the launcher; else the end of
the rank that ended first; else the rank that did not come while others waited. An exception behind torch's `[rank1]:`
ended its rank. What follows from another rank's end is no cause, nor is an error that the program survived. `none`
needs proof that the work was done.
"""

from __future__ import annotations

import re
from collections import Counter

from hpcddp.diagnose.cause import ALL, Cause, fill_remedy
from hpcddp.diagnose.progress import is_done, list_program_lines, mask_numbers
from hpcddp.diagnose.reading import SURVIVED, Log, Mark, read_logs
from hpcddp.diagnose.rows import (
    CAUSE,
    CLASS_OF_SIGNAL,
    CLUSTER,
    END,
    LATE,
    LOST,
    NO_WORD,
    OF_SIGNALS,
    PROGRAM,
    RAISED,
    REQUEST,
    ROWS,
    SENDER,
    WEAK,
)
from hpcddp.record import TYPE_CHECKING
from hpcddp.signals import name_signal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpcddp.runs.logs import LogFile

_SIGABRT, _SIGKILL, _SIGTERM = 6, 9, 15
#: Classes that are no rank's fault.
_OF_NOBODY = {"launcher", "walltime", "rendezvous", "interrupted", "killed"}
_SAYS_WHY = re.compile(
    r"(?i)error|cannot|can't|could not|fail|invalid|missing|not found|refus|abort|no such|unable|must"
    r"|fatal|critical|exceed|limit|\bempty\b|time.?out|giv(e|ing) up|stopp|\bnan\b|diverg"
)
#: Words of a rank that ends on purpose.
_STOPS_EARLY = re.compile(r"(?i)\bearly.?stop|\bstopp(ed|ing|s)? early|no improvement|\bconverged\b")
_OF_LAUNCHER = re.compile(r"ChildFailedError|CalledProcessError|SignalException")
#: Lines that only point to help, or report success.
_SAYS_NOTHING = re.compile(
    r"(?i)^(set the environment|try|for|see|please|usage:|run) |\b(bye|done|finished|completed?|saved|ok)\W*$"
)
_LABELLED = re.compile(r"\b[Rr]ank[ =:]?(\d+)\b|^\[(\d+)\] ")
#: An error of hpcddp's that quotes another rank's.
_OF_ANOTHER = re.compile(r"^hpcddp: (?:\S+: )?rank (?P<rank>\d+) on \S+ failed: ")
#: One that follows from another rank's end, without its reason.
_FOLLOWS = re.compile(r"^hpcddp: (?:\S+: )?(?:a rank failed, and rank |rank 0 left before|rank 0 did not say)")
_BY_LAUNCHER = re.compile(r"(torchrun|accelerate|deepspeed|srun|mpirun|mpiexec|prterun)\b.*: (error|un)")
_IN_USE = re.compile(r"EADDRINUSE|[Aa]ddress already in use")
_SWEEPS = re.compile(r"srun: |CANCELLED AT")
_CANCELLED = re.compile(r"CANCELLED AT|job killed: ")
_COMMAND = re.compile(r"[a-z][\w.-]*: (?!error)")  # one of a job script
#: Commands that many scripts try, and go on without.
_MAY_BE_MISSING = re.compile(r": (module|nvidia-smi|ml|conda|rocm-smi): (command )?not found")
_WORDS = re.compile(r"[A-Za-z]{2,}")


def diagnose(
    sources: Sequence[LogFile], *, job_output: Sequence[LogFile] = (), has_failed: bool | None = None
) -> Cause:
    """The first cause. `job_output`: copies of what the logs hold, of which only the scheduler's words count.
    `has_failed`: as the run's state says; None: unknown. RequestError for a file that cannot be read."""
    logs = read_logs([*sources, *job_output])
    for log in logs[len(sources) :]:
        of_scheduler = (CLUSTER, REQUEST, SENDER)
        log.marks = [m for m in log.marks if m.level == CAUSE and m.row is not None and m.row.whose in of_scheduler]
    return _Judge(logs, has_failed).judge()


class _Judge:
    def __init__(self, logs: Sequence[Log], has_failed: bool | None) -> None:
        self._logs, self._has_failed = logs, has_failed
        files = {log.source.rank for log in logs}  # of these ranks, what a report quotes is there in full
        marks = [mark for log in logs for mark in log.marks]
        self._marks = [mark for mark in marks if not (mark.is_quoted and mark.rank in files)]
        ends = sorted(self._of(END), key=lambda one: (one.log, one.number))
        # A launcher ends the ranks that are left by SIGTERM: they were well, but for one that ended first.
        swept = {mark for mark in ends if mark.signal == _SIGTERM and mark.cause != "killed"}
        sweeps = [(mark.log, mark.number) for mark in self._of(LOST) if _SWEEPS.search(mark.body)]
        is_first = (
            bool(ends)
            and ends[0].rank is not None
            and (ends[0].log, ends[0].number) < min(sweeps, default=(len(logs),))
        )
        swept -= {*ends[:1]} if is_first else set()
        is_swept = any(mark not in swept and mark.cause != "killed" for mark in ends)
        self._ends = [mark for mark in ends if not (is_swept and mark in swept)]
        self._swept = {rank for mark in swept if is_swept for rank in mark.list_ranks()}
        ranks = {rank for log in logs for rank in (*log.ranks, log.source.rank) if rank is not None}
        size = max((log.world_size for log in logs), default=0)
        self._has_run = bool(ranks) or size > 0
        ranks |= {rank for mark in ends for rank in mark.list_ranks()}
        self._world = set(range(max(size, *(rank + 1 for rank in ranks), 0)))
        without_file = self._world - files
        #: The rank whose output is in the job's.
        self._rank_of_job = next(iter(without_file)) if files - {None} and len(without_file) == 1 else None
        self._exit_status = next((log.exit_status for log in logs if log.exit_status is not None), None)
        self._is_bad = bool(has_failed or self._exit_status or self._ends)
        lost = [mark for mark in self._of(LOST, LATE) if mark.is_raised or mark.rank is not None]
        self._lost = [mark for mark in lost if not _OF_LAUNCHER.search(mark.body)]
        self._waited = {mark.rank for mark in self._lost if mark.rank is not None}

    def _of(self, *levels: str) -> list[Mark]:
        return [mark for mark in self._marks if mark.level in levels]

    def judge(self) -> Cause:
        for find in (
            self._find_singletons,
            self._find_cause,
            self._find_refused,
            self._find_end,
            self._find_late,
            self._find_weak,
            self._find_early,
        ):
            if (cause := find()) is not None:
                return cause
        is_shown = self._has_failed is False or is_done(self._logs, len(self._world))
        return Cause("none") if is_shown and not self._is_bad and not self._lost else Cause("unknown")

    # Causes

    def _find_singletons(self) -> Cause | None:
        found = [mark for mark in self._of(WEAK) if mark.cause == "singletons"]
        if len({(mark.log, mark.number) for mark in found}) < 2 or len(self._world) > 1:
            return None
        first = min(found, key=lambda mark: "suspicious" in mark.body)
        return None if any(mark.rank for mark in self._marks) else self._cause(first, ALL)

    def _find_cause(self) -> Cause | None:
        """The first of the exceptions, and of the words of the scheduler, the kernel and the launcher."""
        causes = [mark for mark in self._of(CAUSE) if not (self._is_too_late(mark) or self._is_no_crash(mark))]
        raised = [mark for mark in self._of(RAISED) if mark.is_raised]
        if self._has_failed is False or not (
            self._is_bad or any(not mark.is_logged for mark in self._marks if mark.is_raised)
        ):
            raised = [mark for mark in raised if not mark.is_logged or self._is_last(mark)]
        found = [*causes, *([mark for mark in raised if mark.is_signed] or raised)]
        if not found:
            return None
        first = min(found, key=self._make_key(found))
        if first.cause == "crash" and "terminate called" in first.body:  # its what() says more
            first = next((m for m in found if m.log == first.log and 0 < m.number - first.number < 3), first)
        return self._cause(first, self._find_rank(first, found))

    def _is_no_crash(self, mark: Mark) -> bool:
        """The words of a crash, where a rank ended with a status, which no crash leaves, or where only ranks that lost
        another one ended by a signal: torch's threads abort a process that ends with an exception."""
        ends = [end for end in self._ends if mark.rank is None or mark.rank in end.list_ranks()]
        crashed = [end for end in ends if _signal(end) and not self._waited.issuperset(end.list_ranks() or (None,))]
        has_status = any(end.status for end in ends) and not crashed
        return mark.cause == "crash" and not mark.is_raised and has_status

    def _is_too_late(self, mark: Mark) -> bool:
        """The scheduler ended the job only after a rank had failed, while the others waited for it."""
        if mark.is_raised or mark.cause not in {"killed", "walltime"} or not _CANCELLED.search(mark.body):
            return False
        return self._ended_before(mark)

    def _ended_before(self, mark: Mark) -> bool:
        """A rank failed, or lost a failed one, before the log's first line about a cancelled job."""
        first = min(one.number for one in self._marks if one.log == mark.log and _CANCELLED.search(one.body))
        ends = [end for end in self._ends if _signal(end) != _SIGTERM and (end.signal or end.status)]
        at = self._logs[mark.log].find_time(first)
        return any(
            one.number < first if one.log == mark.log else 0 < self._logs[one.log].find_time(one.number) < at
            for one in (*ends, *self._lost)
        )

    def _make_key(self, marks: Sequence[Mark]) -> Callable[[Mark], tuple[float, ...]]:
        """The sort key of marks: the line's number in one log; in several the time, where lines have one."""
        if len({mark.log for mark in marks}) == 1:
            return lambda mark: (mark.number,)
        return lambda mark: (self._logs[mark.log].find_time(mark.number) or float("inf"), mark.log, mark.number)

    def _find_rank(self, first: Mark, found: Sequence[Mark]) -> int | str | None:
        """The rank at fault, ALL, or None where it is no rank's fault or the logs do not show it."""
        if first.cause == "host-memory" and first.level == CAUSE and not first.is_raised:  # the scheduler's word
            near = [mark for mark in found if mark.cause == first.cause and not mark.is_raised]
            named = {rank for mark in near for rank in mark.list_ranks() or self._list_ranks_on(mark.host)}
            return next(iter(named)) if len(named) == 1 else self._guess_rank() if not named else None
        if first.cause in _OF_NOBODY and not first.ranks and not (first.cause == "rendezvous" and first.is_raised):
            return None
        if (first.row is not None and "execv" in first.body) or _BY_LAUNCHER.match(first.body):
            return None
        same = [mark for mark in found if mask_numbers(mark) == mask_numbers(first)]
        ranks = {mark.rank if mark.rank is not None else self._rank_of_job for mark in same} - {None}
        if len(ranks) > 1 or (not ranks and len(same) > 1):
            return first.rank if self._waited - ranks else ALL
        if first.rank is not None:
            return first.rank
        if first.cause == "rendezvous":  # rank 0 opens the port
            return 0 if first.frame and _IN_USE.search(first.body) else None
        return self._guess_rank()

    def _list_ranks_on(self, host: str) -> set[int]:
        """The ranks that ended on a host."""
        return {rank for end in self._of(END) if host and end.host == host for rank in end.list_ranks()}

    def _guess_rank(self) -> int | None:
        """The rank of a line without a rank's label: the only one that no other rank lost, or the one that the launcher
        names."""
        missing = self._find_missing()
        if missing is not None:
            return missing
        end = next((mark for mark in self._ends if mark.rank is not None and mark.signal != _SIGTERM), None)
        return end.rank if end is not None and end.rank not in self._waited else self._rank_of_job

    def _find_missing(self, *, hangs: bool = False) -> int | None:
        """The only rank that does not report a lost rank. `hangs`: it may have lived until the end."""
        missing = self._world - self._waited - (set() if hangs else self._swept)
        return next(iter(missing)) if self._waited and len(missing) == 1 else None

    # Ends

    def _find_refused(self) -> Cause | None:
        """An error of hpcddp as a rank's or the job's last message, without a kill before. Its hint is the remedy."""
        kills = [mark for mark in self._ends if _signal(mark) or mark.cause in {"killed", "interrupted"}]
        kills += [mark for mark in self._of(LOST) if mark.cause == "killed"]
        errors = [
            mark
            for mark in self._of(WEAK)
            if "\n" in mark.body
            and not _FOLLOWS.match(mark.body)
            and all(kill.log == mark.log and kill.number > mark.number for kill in kills)
            and self._is_last_message(mark)
        ]
        if self._has_failed is False or not errors:
            return None
        named = next((int(found["rank"]) for mark in errors if (found := _OF_ANOTHER.match(mark.body))), None)
        first = named if named is not None else next((end.rank for end in self._ends if end.rank is not None), None)
        first_hand = [mark for mark in errors if not _OF_ANOTHER.match(mark.body)] or errors
        mark = next(
            (one for one in first_hand if one.rank == first),
            next((one for one in first_hand if one.rank is None), errors[0]),
        )
        cause = self._cause(mark, named if named is not None else self._find_rank(mark, first_hand))
        known = [one for one in self._marks if (one.log, one.number) == (mark.log, mark.number)]
        row = next((one.row for one in known if one.row is not None and one.level in {CAUSE, RAISED}), None)
        return cause if row is None else cause._replace(class_=row.cause, whose=row.whose)

    def _is_last_message(self, mark: Mark) -> bool:
        """No line of a program follows; in a failed job none that gives a reason."""
        log = self._logs[mark.log]
        ends = [one.number for one in log.marks if one.number > mark.number and one.level in {END, LOST, LATE}]
        lines = list_program_lines(log, min(ends, default=log.end))
        texts = [text for number, text in lines if number > mark.number and _WORDS.search(text)]
        return not any(_SAYS_WHY.search(text) for text in texts) if self._is_bad or ends else not texts

    def _find_end(self) -> Cause | None:
        """How the rank ended that ended first, where it has raised nothing."""
        step = next((mark for mark in self._of(LOST) if mark.cause == "killed" and "CANCELLED AT" in mark.body), None)
        if step is not None and not self._ended_before(step):  # before any rank's end
            return self._of_signal(step._replace(signal=0), None)
        # NCCL's watchdog, and torch's threads, abort a rank that lost another one
        aborted = [mark for mark in self._ends if mark.signal == _SIGABRT and mark.rank in self._waited]
        signals = [mark for mark in self._ends if _signal(mark) and mark not in aborted]
        sent = [mark for mark in self._ends if mark.cause in {"killed", "interrupted"}]
        others = [mark for mark in signals if _signal(mark) != _SIGTERM]
        if sent and (not others or sent[0].number < others[0].number):
            return self._of_signal(sent[0], None)
        if others:
            rank = next((mark.rank for mark in others if mark.rank is not None), None)
            return self._of_signal(others[0], rank if rank is not None else self._find_missing())
        if signals and not self._of(LATE):
            return self._of_signal(signals[0], signals[0].rank if signals[0].rank is not None else self._find_missing())
        return self._find_exit()

    def _of_signal(self, mark: Mark, rank: int | None) -> Cause:
        limit = next((one for one in self._of(RAISED) if one.cause == "walltime"), None)
        if limit is not None and mark.cause == "killed":  # by the script's own limit
            return self._cause(limit, None)._replace(also=("killed",))
        number = _signal(mark)
        name = name_signal(number) if number else "a signal"
        class_ = CLASS_OF_SIGNAL.get(number, "killed")
        also: tuple[str, ...] = ()
        whose, remedy = OF_SIGNALS[class_]
        if number == _SIGKILL:
            also = ("killed",)
            remedy = f"{name} says nothing of its sender, which most often is the kernel, out of memory: {remedy}"
        elif class_ == "walltime":
            rank, also = None, ("killed",)
        elif class_ == "killed":
            remedy = f"{name} came from outside: {(mark.row.remedy if mark.row is not None else '') or remedy}"
        elif class_ == "interrupted":
            rank = None
        return self._cause(mark, rank)._replace(class_=class_, also=also, remedy=remedy, whose=whose)

    def _find_exit(self) -> Cause | None:
        """A rank that ended with a status and raised nothing: what it printed last is the line. Once a line without a
        rank reports a lost rank, the ends below it do not count."""
        lost = min(((mark.log, mark.number) for mark in self._lost if mark.rank is None), default=None)
        ends = [end for end in self._ends if lost is None or (end.log, end.number) < lost]
        alone = [end for end in ends if not end.signal and end.rank is not None and end.rank not in self._waited]
        if not alone:
            return None
        end, rank = alone[0], alone[0].rank
        ended = {rank for one in alone for rank in one.list_ranks()}
        is_all = len(ended) > 1 and ended >= self._world - self._swept and len({one.status for one in alone}) == 1
        whose = ALL if is_all else rank
        found = self._find_message(end, whose)
        if found is not None:
            return self._judge_message(found, whose, end.host)
        if self._of(WEAK):
            return None
        if end.status in {None, 1}:  # an exception has it, too, whose traceback is not here
            return Cause("unknown", whose, end.host, remedy=NO_WORD)
        return self._cause(end, whose)._replace(class_="exit-status", whose=PROGRAM, remedy=NO_WORD)

    def _judge_message(self, found: tuple[Log, int, str], rank: int | str | None, host: str) -> Cause:
        """The cause of a rank that ended after printing this message, which may fit a row."""
        log, number, text = found
        known = [mark for mark in self._marks if (mark.log, mark.number) == (log.number, number)]
        named = (mark for mark in known if mark.row is not None and mark.row.remedy and not self._is_no_crash(mark))
        if (mark := next(named, None)) is not None:
            return self._cause(mark, rank)
        remedy = "the message is the program's own: look there"
        return Cause("exit-status", rank, host, log.source.path, number, text, PROGRAM, remedy)

    def _find_message(self, end: Mark, rank: int | str | None) -> tuple[Log, int, str] | None:
        """The last line that a rank printed before its end, or all ranks did, and that is unlike those above it; one
        that says why before one that does not."""
        log = next((log for log in self._logs if log.source.rank == rank and rank is not None), self._logs[end.log])
        ends = [mark.number for mark in log.marks if mark.level in {LOST, LATE, END}]
        ends += [end.number] if log.number == end.log else []
        marked = {mark.number for mark in log.marks if mark.is_raised or mark.level == WEAK}
        lines = list_program_lines(log, min(ends, default=log.end))
        counts = Counter(_shape(line) for _, line in lines)
        times = len(self._world) if rank == ALL else 1
        best, is_over = None, False
        for number, line in reversed(lines[-12 * times :]):
            label, count = _LABELLED.search(line), counts[_shape(line)]
            if number in marked or not _WORDS.search(line) or _SAYS_NOTHING.search(line) or SURVIVED.search(line):
                continue
            if label is not None and isinstance(rank, int) and int(label[1] or label[2]) != rank:
                continue
            says_why = _SAYS_WHY.search(line) is not None
            if count > times and not (
                says_why and count == len(self._world)
            ):  # progress: what is above is no last word
                if best is not None:
                    break
                is_over = True
            elif says_why:
                return log, number, line
            elif not is_over:
                best = best or (log, number, line)
        return best

    # Waits

    def _find_late(self) -> Cause | None:
        """Who did not come, where others waited for it until a timeout."""
        late = self._of(LATE)
        if not late:
            return None
        ended = {rank for end in self._ends if end.status for rank in end.list_ranks()}
        ended |= {0} if any("clients joined" in mark.body for mark in late) else set()  # whom the others call
        named = next((mark for mark in late if mark.ranks and mark.ranks[0] not in ended), None)
        if named is not None:
            return self._cause(named, named.ranks[0])
        first = min(late, key=self._make_key(late))
        rank = self._find_missing(hangs=True)
        if rank is None and first.cause != "rendezvous":  # the others complain of its end, or elsewhere
            others = self._world - {mark.rank for mark in late}
            if any("monitoredBarrier" in mark.body for mark in late):  # rank 0 waits for each rank in turn
                others -= {0}
            rank = next(iter(others)) if len(others) == 1 else None
        return self._cause(first, rank)

    def _find_early(self) -> Cause | None:
        """A rank that is the only one without a complaint: it ended itself, well as far as anybody says, while the
        others still waited for it."""
        lost = [mark for mark in self._lost if mark.level == LOST and mark.is_raised and mark.rank is not None]
        missing = self._find_missing()
        if not lost or missing is None:
            return None
        has_ends = bool(self._ends) or any("ChildFailed" in mark.body for mark in self._marks)  # of other ranks
        found = self._find_message(min(lost, key=lambda mark: (mark.log, mark.number)), missing)
        text = found[2] if found is not None else ""
        is_why = not _STOPS_EARLY.search(text) and (_SAYS_WHY.search(text) or not _LABELLED.search(text))
        if found is not None and is_why and not has_ends:
            return self._judge_message(found, missing, "")
        remedy = next(row.remedy for row in ROWS if row.cause == "early-exit")
        also = () if has_ends else ("exit-status",)
        cause = self._cause(lost[0], missing)._replace(class_="early-exit", whose=PROGRAM, remedy=remedy, also=also)
        last = self._find_last_line(missing)
        return cause if last is None else cause._replace(file=last[0].source.path, line=last[1], text=last[2])

    def _find_last_line(self, rank: int) -> tuple[Log, int, str] | None:
        """The last line of a rank, if it is unlike all others of the log."""
        for log in sorted(self._logs, key=lambda one: one.source.rank != rank):
            lines = list_program_lines(log, log.end)
            counts = Counter(_shape(line) for _, line in lines)
            lines = [one for one in lines if log.source.rank == rank or log.find_rank(one[1]) == rank]
            shape = _shape(lines[-1][1]) if lines else ""
            if counts[shape] == 1 and _WORDS.search(shape.replace("ank #", "")):
                return log, *lines[-1]
        return None

    def _find_weak(self) -> Cause | None:
        """The last error that a shell or the program printed, where nothing else is known and the job has failed."""
        printed = [mark for mark in self._of(RAISED) if not mark.is_raised]
        weak = [mark for mark in self._of(WEAK) if mark.cause != "singletons" and "\n" not in mark.body]
        weak = [mark for mark in weak if not _MAY_BE_MISSING.search(mark.text) or self._is_last(mark)]
        is_bad = self._is_bad
        if not self._has_run and self._has_failed is None:  # a job script that ended with an error of a program in it
            is_bad = is_bad or any(self._is_last(mark) for mark in (*printed, *weak))
        if printed and is_bad:
            return self._cause(printed[-1], printed[-1].rank)
        if weak and not self._has_run and (is_bad or self._has_failed is None):
            return self._cause(weak[-1], None)
        return None

    def _is_last(self, mark: Mark) -> bool:
        """The log ends with the line, but for more of the same command."""
        log, command = self._logs[mark.log], _COMMAND.match(mark.text)
        below = (log.lines[at] for at in range(mark.number - log.skipped, len(log.lines)))  # no copy: it has many marks
        return all(command is not None and line.startswith(command[0].encode()) for line in below if line.strip())

    def _cause(self, mark: Mark, rank: int | str | None) -> Cause:
        log, row = self._logs[mark.log], mark.row
        where = f"look at {mark.frame}" if mark.frame else "look at the traceback above the line"
        remedy = where if row is None else fill_remedy(row, mark.body)
        if row is not None and mark.frame:
            remedy = f"{where}: {remedy}"
        hosts = [log.source.host for log in self._logs if log.source.rank == rank]
        hosts += [end.host for end in self._ends if end.rank == rank]
        host = mark.host or (next(filter(None, hosts), "") if rank is not None else "")
        whose = row.whose if row is not None else PROGRAM
        return Cause(mark.cause, rank, host, log.source.path, mark.number, mark.text, whose, remedy)


def _signal(mark: Mark) -> int:
    return mark.signal or max((mark.status or 0) - 128, 0)


def _shape(line: str) -> str:
    return re.sub(r"\d+(\.\d+)?(e[+-]\d+)?", "#", line)
