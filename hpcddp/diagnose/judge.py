"""Which of the lines that say something is the first cause, and which rank is at fault.

In this order: what a rank raised, or the scheduler, the kernel or the launcher said, the first of it; else how the rank
ended that ended first; else who did not come while others waited. Of exceptions those that torch has signed ended their
rank; a traceback that does not begin where its program began was caught, and counts where no other is there. What
follows from another rank's end is no cause, nor is what a program has survived. That nothing failed has to be proven.
"""

from __future__ import annotations

import re
from collections import Counter

from hpcddp.diagnose.cause import ALL, Cause, fill_remedy
from hpcddp.diagnose.progress import alike, is_done, list_own_lines
from hpcddp.diagnose.reading import SURVIVED, Log, Mark, read_logs
from hpcddp.diagnose.rows import (
    CAUSE,
    CLASS_OF_SIGNAL,
    CLUSTER,
    END,
    LATE,
    LOST,
    MARK,
    MAY_BE_MISSING,
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
    from collections.abc import Sequence

    from hpcddp.runs.logs import LogFile

_SIGABRT, _SIGKILL, _SIGTERM, _SIGINT = 6, 9, 15, 2
#: Classes that are no rank's fault.
_OF_NOBODY = {"launcher", "walltime", "rendezvous", "interrupted", "killed"}
_TIMEOUT_STATUS = 124  # of timeout(1)
_SAYS_WHY = re.compile(
    r"(?i)error|cannot|can't|could not|fail|invalid|missing|not found|refus|abort|no such|unable|must"
    r"|fatal|critical|exceed|limit|time.?out|giv(e|ing) up|stopp|\bnan\b|diverg"
)
#: A rank that ends on purpose says so.
_MEANS_TO = re.compile(r"(?i)\bearly.?stop|\bstopp(ed|ing|s)? early|no improvement|\bconverged\b")
_OF_LAUNCHER = re.compile(r"ChildFailedError|CalledProcessError|SignalException")
_BY_LAUNCHER = re.compile(
    r"(torchrun|accelerate|deepspeed|srun|mpirun|mpiexec|prterun)\b.*: (error|unrecognized|unknown)"
)
_ALL_WELL = re.compile(r"(?i)\b(bye|done|finished|completed?|saved|ok)\W*$")
#: What only tells where to read more, or that all is well.
_SAYS_NOTHING = re.compile(rf"(?i)^(set the environment|try|for|see|please|usage:|run) |{_ALL_WELL.pattern[4:]}")
_LABELLED = re.compile(r"\b[Rr]ank[ =:]?(\d+)\b|^\[(\d+)\] ")
#: An error of hpcddp's that tells of another rank's.
_OF_ANOTHER = re.compile(r"^hpcddp: (?:\S+: )?rank (?P<rank>\d+) on \S+ failed: ")
#: One that follows from another rank's end, of which it knows nothing.
_FOLLOWS = re.compile(r"^hpcddp: (?:\S+: )?(?:a rank failed, and rank |rank 0 left before|rank 0 did not say)")
_IN_USE = re.compile(r"EADDRINUSE|[Aa]ddress already in use")
_SWEEPS = re.compile(r"srun: |CANCELLED AT")
_ABORTS = re.compile(r"abort(ing|ed)?[.!]*$")  # which a program may print that exits with a status
_CANCELLED = re.compile(r"CANCELLED AT|job killed: ")
_COMMAND = re.compile(r"[a-z][\w.-]*: (?!error)")  # one of a job script
_WORDS = re.compile(r"[A-Za-z]{2,}")


def diagnose(sources: Sequence[LogFile], *, beside: Sequence[LogFile] = (), has_failed: bool | None = None) -> Cause:
    """The first cause. `beside`: a job's own output, which holds what is in its logs, too: of it only the scheduler's
    words count. `has_failed`: what the run says; None: nobody does. RequestError for a file that cannot be read."""
    logs = read_logs([*sources, *beside])
    for log in logs[len(sources) :]:
        of_scheduler = (CLUSTER, REQUEST, SENDER)
        log.marks = [m for m in log.marks if m.level == CAUSE and m.row is not None and m.row.whose in of_scheduler]
    return _Judge(logs, has_failed).judge()


class _Judge:
    def __init__(self, logs: Sequence[Log], has_failed: bool | None) -> None:
        self._logs, self._has_failed = logs, has_failed
        own = {log.source.rank for log in logs}  # of these, what a report quotes is there in full
        marks = [mark for log in logs for mark in log.marks]
        self._marks = [mark for mark in marks if not (mark.is_quoted and mark.rank in own)]
        ends = sorted(self._of(END), key=lambda one: (one.log, one.number))
        #: A launcher ends the ranks that are left by SIGTERM: they were well.
        sweeps = [(mark.log, mark.number) for mark in self._of(LOST) if _SWEEPS.search(mark.body)]
        first = {(mark.log, mark.number) for mark in ends[:1] if mark.rank is not None}
        first -= {place for place in first for sweep in sweeps if sweep < place}
        swept = {mark for mark in ends if mark.signal == _SIGTERM and mark.cause != "killed"}
        swept -= {mark for mark in swept if (mark.log, mark.number) in first}
        is_swept = any(mark not in swept and mark.cause != "killed" for mark in ends)
        self._ends = [mark for mark in ends if not (is_swept and mark in swept)]
        self._swept = {rank for mark in swept for rank in mark.ranks or (mark.rank,) if is_swept and rank is not None}
        ranks = {rank for log in logs for rank in log.ranks} | {log.source.rank for log in logs} - {None}
        self._has_run = bool(ranks) or any(log.world_size for log in logs)
        ranks |= {rank for mark in ends for rank in mark.ranks or (mark.rank,)} - {None}
        size = max((log.world_size for log in logs), default=0)
        self._world = (
            set(range(max(size, *(int(rank) + 1 for rank in ranks if rank is not None), 0)))
            if ranks
            else set(range(size))
        )
        left = self._world - own  # whose output is in the job's
        self._left = next(iter(left)) if own - {None} and len(left) == 1 else None
        self._exit_status = next((log.exit_status for log in logs if log.exit_status is not None), None)
        ended = any(mark.is_raised and not mark.is_logged for mark in self._marks)
        #: Nothing says that the job has failed.
        self._seems_well = not has_failed if has_failed is not None else not (self._ends or self._exit_status or ended)
        lost = [mark for mark in self._of(LOST, LATE) if mark.is_raised or mark.rank is not None]
        self._lost = [mark for mark in lost if not _OF_LAUNCHER.search(mark.body)]

    def _of(self, *levels: str) -> list[Mark]:
        return [mark for mark in self._marks if mark.level in levels]

    def judge(self) -> Cause:
        for find in (
            self._find_singletons,
            self._find_cause,
            self._find_end,
            self._find_late,
            self._find_weak,
            self._find_early,
        ):
            if (cause := find()) is not None:
                return cause
        is_bad = self._has_failed or self._exit_status or self._ends or self._lost
        is_shown = self._has_failed is False or is_done(self._logs, len(self._world))
        return Cause("none") if is_shown and not is_bad else Cause("unknown")

    # Causes

    def _find_singletons(self) -> Cause | None:
        found = [mark for mark in self._of(WEAK) if mark.cause == "singletons"]
        alone = [mark for mark in found if "suspicious" not in mark.body]
        several = len(alone) > 1 and len({(mark.log, mark.number) for mark in alone}) > 1
        if not several and not (found and not alone and len(found) > 1):
            return None
        if any(mark.rank for mark in self._marks) or len(self._world) > 1:
            return None
        return self._cause((alone or found)[0], ALL)

    def _find_cause(self) -> Cause | None:
        """The first of what was raised or said by who knows."""
        said = [mark for mark in self._of(CAUSE) if not (self._is_too_late(mark) or self._is_no_crash(mark))]
        raised = [mark for mark in self._of(RAISED) if mark.is_raised]
        raised = [mark for mark in raised if not (mark.is_logged and self._seems_well) or self._is_last(mark)]
        signed = [mark for mark in raised if mark.is_signed]
        raised = signed or [mark for mark in raised if not mark.is_caught] or raised
        last = {(mark.log, mark.rank, mark.body) if mark.is_logged else id(mark): mark for mark in raised}
        found = [*said, *last.values()]
        if not found:
            return None
        first = min(found, key=self._order(found))
        if first.cause == "crash" and "terminate called" in first.body:  # its what() says more
            first = next((m for m in found if m.log == first.log and 0 < m.number - first.number < 3), first)
        rank = self._find_rank(first, found)
        return self._cause(first, rank)

    def _is_no_crash(self, mark: Mark) -> bool:
        """Whether the words are those of a crash, and the rank has ended with a status of its own, or torchrun tells of
        no signal but its own, or nobody of any where a program says that it aborts."""
        if mark.cause != "crash" or mark.is_raised:
            return False
        ended = {rank: end for end in self._ends if end.status for rank in end.ranks or (end.rank,)}
        end = ended.get(mark.rank)
        if end is not None:
            return not _signal(end)
        told = self._of(END)
        is_told = any("exitcode" in one.body for one in told) or _ABORTS.search(mark.body) is not None
        return is_told and all(_signal(one) in {0, _SIGTERM} and "EXIT STRING" not in one.body for one in told)

    def _is_too_late(self, mark: Mark) -> bool:
        """Whether the scheduler ended a job, of which ranks had ended badly before, and others waited for them."""
        if mark.is_raised or mark.cause not in {"killed", "walltime"} or not _CANCELLED.search(mark.body):
            return False
        return self._ended_before(mark)

    def _ended_before(self, mark: Mark) -> bool:
        """Whether ranks had lost others, or ended by themselves, before this line and all of its kind."""
        first = min(one.number for one in self._marks if one.log == mark.log and _CANCELLED.search(one.body))
        ends = [end for end in self._ends if _signal(end) != _SIGTERM and (end.signal or end.status)]
        at = self._logs[mark.log].find_time(first)
        return any(
            one.number < first if one.log == mark.log else 0 < self._logs[one.log].find_time(one.number) < at
            for one in (*ends, *self._lost)
        )

    def _order(self, marks: Sequence[Mark]):  # type: ignore[no-untyped-def]
        """By the place in one log; of several logs by time, as far as lines have one, and the rank that ended first."""
        if len({mark.log for mark in marks}) == 1:
            return lambda mark: (mark.number,)
        return lambda mark: (
            self._logs[mark.log].find_time(mark.number) or float("inf"),
            mark.log,
            mark.number,
        )

    @property
    def _first_end(self) -> Mark | None:
        """The launcher's word on the rank that ended first; torchrun says it with the ranks' own numbers."""
        ends = [mark for mark in self._ends if mark.rank is not None and mark.signal != _SIGTERM]
        roots = [mark for mark in ends if "first observed" in mark.body]
        return next(iter(roots or ends), None)

    def _find_rank(self, first: Mark, found: Sequence[Mark]) -> int | str | None:
        """Whose fault a cause is."""
        if first.cause == "host-memory" and first.level == CAUSE and not first.is_raised:  # the scheduler's word
            near = [mark for mark in found if mark.cause == first.cause and not mark.is_raised]
            named = {rank for mark in near for rank in mark.ranks or self._list_ranks_on(mark)}
            return next(iter(named)) if len(named) == 1 else self._guess_rank() if not named else None
        if _BY_LAUNCHER.match(first.body):
            return None
        if first.cause in _OF_NOBODY and not first.ranks and not (first.cause == "rendezvous" and first.is_raised):
            return None
        same = [mark for mark in found if alike(mark) == alike(first)]
        ranks = {mark.rank if mark.rank is not None else self._left for mark in same} - {None}
        waited = {mark.rank for mark in self._lost if mark.rank is not None} - ranks
        if first.row is not None and "execv" in first.body:
            return None
        if len(ranks) > 1 or (not ranks and len(same) > 1):
            return (first.rank if first.rank is not None else None) if waited else ALL
        if first.rank is not None:
            return first.rank
        if first.cause == "rendezvous":  # rank 0 opens the port
            return 0 if first.frame and _IN_USE.search(first.body) else None
        return self._guess_rank()

    def _list_ranks_on(self, mark: Mark) -> set[int]:
        """The rank of a line, or those that ended on its host."""
        if mark.rank is not None:
            return {mark.rank}
        ended = {rank: end.host for end in self._of(END) for rank in end.ranks or (end.rank,) if rank is not None}
        return {rank for rank, host in ended.items() if mark.host and host == mark.host}

    def _guess_rank(self) -> int | None:
        """The rank of a line that nobody has signed: the one that is not among those that have seen it end, or that the
        launcher names."""
        missing = self._find_missing()
        if missing is not None:
            return missing
        end = self._first_end
        if end is not None and not any(mark.rank == end.rank for mark in self._lost):
            return end.rank
        return self._left

    def _find_missing(self, *, hangs: bool = False) -> int | None:
        """The only rank that has not complained of another one. `hangs`: it may have lived until the end."""
        waited = {mark.rank for mark in self._lost if mark.rank is not None}
        missing = self._world - waited - (set() if hangs else self._swept)
        return next(iter(missing)) if waited and len(missing) == 1 else None

    # Ends

    def _find_end(self) -> Cause | None:
        """How the rank ended that ended first, where it has raised nothing."""
        late = {mark.rank for mark in self._of(LATE)}
        step = next((mark for mark in self._of(LOST) if mark.cause == "killed" and "CANCELLED AT" in mark.body), None)
        if (refused := self._find_refused(step)) is not None:
            return refused
        if step is not None and not self._ended_before(step):  # before any rank's end
            return self._of_signal(step._replace(signal=0), None)
        ends = [mark for mark in self._ends if not (mark.signal in {0, _SIGABRT} and mark.rank in late)]
        signals = [mark for mark in ends if mark.signal or (mark.status or 0) > 128]
        taken = [mark for mark in ends if mark.cause in {"killed", "interrupted"}]
        others = [mark for mark in signals if _signal(mark) not in {_SIGTERM}]
        if taken and (not others or taken[0].number < others[0].number):
            return self._of_signal(taken[0], None)
        if others:
            rank = self._rank_of_end(others)
            said = self._find_said(others[0], rank)
            return self._of_signal(others[0], rank) if said is None else self._cause(said, rank)
        marks = self._of(MARK)
        if marks:
            return self._cause(marks[0], self._guess_rank())
        if signals and not late:
            return self._of_signal(signals[0], signals[0].rank if signals[0].rank is not None else self._find_missing())
        return self._find_own_end(ends)

    def _find_refused(self, step: Mark | None) -> Cause | None:
        """An error of hpcddp's own that is the last word of a rank, or of the job, and that no kill stands before.
        `step`: the line of the scheduler that ended the ranks."""
        said = [mark for mark in self._of(WEAK) if "\n" in mark.body and self._is_last_word(mark)]
        kills = [
            mark
            for mark in self._ends
            if mark.signal or (mark.status or 0) > 128 or mark.cause in {"killed", "interrupted"}
        ]
        kills += [*self._of(MARK), *([step] if step is not None else [])]
        if self._has_failed is False or not any(
            all(kill.log == mark.log and kill.number > mark.number for kill in kills) for mark in said
        ):
            return None
        own = [mark for mark in said if not _OF_ANOTHER.match(mark.body)]
        named = next((int(found["rank"]) for mark in said if (found := _OF_ANOTHER.match(mark.body))), None)
        first = named if named is not None else next((end.rank for end in self._ends if end.rank is not None), None)
        mark = next(
            (one for rank in (first, None) for one in own if one.rank == rank), (said if named else own or said)[0]
        )
        # Its hint is the remedy; a row may know its class.
        known = (one for one in self._marks if one.log == mark.log and one.number == mark.number)
        row = next((one.row for one in known if one.row is not None and one.level in {CAUSE, RAISED}), None)
        cause = self._cause(mark, named if named is not None else self._find_rank(mark, own))
        return cause if row is None else cause._replace(class_=row.cause, whose=row.whose)

    def _is_last_word(self, mark: Mark) -> bool:
        """Whether its rank says nothing behind this error of hpcddp's. In the output of a failed job others or
        its launcher may say a little, but not why."""
        known = [one for one in self._marks if one.log == mark.log]
        if _FOLLOWS.match(mark.body) or any(one.number == mark.number and one.level in {LOST, LATE} for one in known):
            return False
        log = self._logs[mark.log]
        ends = (one.number for one in known if one.number > mark.number and one.level in {END, LOST, LATE})
        end = min(ends, default=0)
        lines = list_own_lines(log, end or len(log.lines) + log.skipped + 1)
        texts = [text for number, text in lines if number > mark.number and _WORDS.search(text)]
        is_bad = bool(self._has_failed) or bool(self._exit_status) or bool(end)
        return not any(_SAYS_WHY.search(text) for text in texts) if is_bad else not texts

    def _find_said(self, end: Mark, rank: int | None) -> Mark | None:
        """What a rank that crashed has printed of a lack of something, right before."""
        if CLASS_OF_SIGNAL.get(_signal(end)) != "crash":
            return None
        lacks = {"limits", "host-memory", "shm", "disk-full", "library"}
        near = [mark for mark in self._of(RAISED) if mark.log == end.log and 0 < end.number - mark.number <= 40]
        return next((mark for mark in near if mark.cause in lacks and mark.rank in {None, rank}), None)

    def _rank_of_end(self, ends: Sequence[Mark]) -> int | None:
        roots = [mark for mark in ends if "first observed" in mark.body]
        first = next((mark.rank for mark in (*roots, *ends) if mark.rank is not None), None)
        return first if first is not None else self._find_missing()

    def _of_signal(self, mark: Mark, rank: int | None) -> Cause:
        number = _signal(mark)
        name = name_signal(number) if number else "a signal"
        said = next((one for one in self._of(RAISED) if one.cause == "walltime"), None)
        if said is not None and mark.cause == "killed":
            return self._cause(said, None)._replace(also=("killed",))
        if number in {0, _SIGTERM, _SIGINT} and self._exit_status == _TIMEOUT_STATUS:
            remedy = "timeout(1) in the job script ended it: a longer one, or checkpoints and chain: N in the job file"
            return self._cause(mark, None)._replace(class_="walltime", remedy=remedy, also=("killed",))
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

    def _find_own_end(self, ends: Sequence[Mark]) -> Cause | None:
        """A rank that ended with a status and raised nothing: its own words above are the line. If nobody says whose
        the complaints about other ranks are, only an end above them counts."""
        waited = {mark.rank for mark in self._lost if mark.rank is not None}
        nobodys = [(mark.log, mark.number) for mark in self._lost if mark.rank is None]
        left = [end for end in ends if not nobodys or (end.log, end.number) < min(nobodys)]
        own = [end for end in left if not end.signal and end.rank is not None and end.rank not in waited]
        unnamed = [end for end in left if not end.signal and end.rank is None and end.status]
        if not own and (not unnamed or (waited and self._find_missing() is None)):
            return None
        end = (own or unnamed)[0]
        rank: int | str | None = end.rank if end.rank is not None else self._find_missing()
        ended = {one for end in own for one in end.ranks or (end.rank,)}
        if len(ended) > 1 and ended >= self._world - self._swept and len({end.status for end in own}) == 1:
            rank = ALL
        found = self._find_message(end, rank)
        if found is None:
            if self._of(WEAK):
                return None
            if end.status in {None, 1}:  # an exception has it, too, whose traceback is not here
                return Cause("unknown", rank, end.host, remedy=NO_WORD)
            return self._cause(end, rank)._replace(class_="exit-status", whose=PROGRAM, remedy=NO_WORD)
        return self._own_words(found, rank, end.host)

    def _own_words(self, found: tuple[Log, int, str], rank: int | str | None, host: str) -> Cause:
        """The cause of a rank that ended after these words of its own; a row may know them."""
        log, number, text = found
        if log.source.rank is None and len(self._world) > 1:
            same = [line for _, line in list_own_lines(log, len(log.lines) + log.skipped + 1) if line == text]
            rank = ALL if len(same) == len(self._world) else rank
        known = (mark for mark in self._marks if (mark.log, mark.number) == (log.number, number))
        known = (mark for mark in known if mark.row is not None and not self._is_no_crash(mark))
        named = next((mark for mark in known if mark.row is not None and mark.row.remedy), None)
        if named is not None:
            return self._cause(named, rank)
        remedy = "the message is the program's own: look there"
        return Cause("exit-status", rank, host, log.source.path, number, text, PROGRAM, remedy)

    def _find_message(self, end: Mark, rank: int | str | None) -> tuple[Log, int, str] | None:
        """The last line that a rank printed before its end, or all ranks did, and that is unlike those above it."""
        if "The end of its output" in end.body:
            told, at = self._logs[end.log], end.number - self._logs[end.log].skipped
            while at < len(told.lines) and told.lines[at].startswith(b"    "):
                at += 1
            quoted = [line.decode(errors="replace").strip() for line in told.lines[end.number - told.skipped : at]]
            is_again = [_shape(line) for line in quoted].count(_shape(quoted[-1])) > 1 if quoted else True
            return None if is_again else (told, at + told.skipped, quoted[-1])
        log = next((log for log in self._logs if log.source.rank == rank and rank is not None), self._logs[end.log])
        known = [mark for mark in self._marks if mark.log == log.number]
        ends = [mark.number for mark in known if mark.level in {LOST, LATE, END}]
        if log.number == end.log:
            ends.append(end.number)
        marked = {mark.number for mark in known if mark.is_raised or mark.level == WEAK}
        lines = list_own_lines(log, min(ends, default=len(log.lines) + log.skipped + 1))
        counts = Counter(_shape(line) for _, line in lines)
        times = len(self._world) if rank == ALL else 1
        best, went_on = None, False
        for number, line in reversed(lines[-12 * times :]):
            label = _LABELLED.search(line)
            if number in marked or not _WORDS.search(line) or _SAYS_NOTHING.search(line) or SURVIVED.search(line):
                went_on |= _ALL_WELL.search(line) is not None
                continue
            if label is not None and isinstance(rank, int) and int(label[1] or label[2]) != rank:
                continue
            if counts[_shape(line)] > times and not (
                counts[_shape(line)] == len(self._world) and _SAYS_WHY.search(line)
            ):
                went_on = True
                if best is not None:
                    break
                continue
            if _SAYS_WHY.search(line):
                return log, number, line
            if not went_on or label is not None:  # else nobody's last word
                best = best or (log, number, line)
        return best

    # Waits

    def _find_late(self) -> Cause | None:
        """Who did not come, where others waited for it until a timeout."""
        late = self._of(LATE)
        if not late:
            return None
        ended = {rank for end in self._ends if end.status for rank in end.ranks or (end.rank,)}
        ended |= {0} if any("clients joined" in mark.body for mark in late) else set()  # whom the others call
        named = next((mark for mark in late if mark.ranks and mark.ranks[0] not in ended), None)
        first = named or min(late, key=self._order(late))
        rank = named.ranks[0] if named is not None else None
        if rank is None:
            rank = self._find_missing(hangs=True) if first.cause == "rendezvous" else self._find_absent(late)
        return self._cause(first, rank)

    def _find_absent(self, late: Sequence[Mark]) -> int | None:
        """The rank that the others waited for: that complains of nothing, or only of their end, or elsewhere."""
        if (missing := self._find_missing(hangs=True)) is not None:
            return missing
        if any("monitoredBarrier" in mark.body for mark in late):  # rank 0 waits for each rank in turn
            others = self._world - {0} - {mark.rank for mark in self._lost}
            return next(iter(others)) if len(others) == 1 else None if others else 0
        waited = {mark.rank for mark in late}
        others = self._world - waited
        if len(others) == 1:
            return next(iter(others))
        frames: dict[str, set[int]] = {}
        for mark in self._lost:
            if mark.frame and mark.rank is not None:
                frames.setdefault(mark.frame, set()).add(mark.rank)
        alone = [ranks for ranks in frames.values() if len(ranks) == 1]
        if len(frames) == 2 and len(alone) == 1 and len(self._world) > 2:
            return next(iter(alone[0]))
        return None

    def _find_early(self) -> Cause | None:
        """A rank that is the only one without a complaint: it ended itself, well as far as anybody says, while the
        others still waited for it."""
        lost = [mark for mark in self._lost if mark.level == LOST and mark.is_raised and mark.rank is not None]
        missing = self._find_missing()
        if not lost or missing is None:
            return None
        is_told = bool(self._ends) or any("ChildFailed" in mark.body for mark in self._marks)  # of any other end
        found = self._find_message(min(lost, key=lambda mark: (mark.log, mark.number)), missing)
        text = found[2] if found is not None else ""
        is_why = not _MEANS_TO.search(text) and (_SAYS_WHY.search(text) or not _LABELLED.search(text))
        if found is not None and is_why and not is_told:
            return self._own_words(found, missing, "")
        cause = self._cause(lost[0], missing)._replace(
            class_="early-exit",
            whose=PROGRAM,
            remedy=_find_any_remedy("early-exit"),
            also=() if is_told else ("exit-status",),
        )
        said = self._find_last_word(missing)
        return cause if said is None else cause._replace(file=said[0].source.path, line=said[1], text=said[2])

    def _find_last_word(self, rank: int) -> tuple[Log, int, str] | None:
        """The last line of a rank, if it is unlike all others of the log."""
        for log in sorted(self._logs, key=lambda one: one.source.rank != rank):
            lines = list_own_lines(log, len(log.lines) + log.skipped + 1)
            counts = Counter(_shape(line) for _, line in lines)
            said = [(number, line) for number, line in lines if log.source.rank == rank or log.find_rank(line) == rank]
            if (
                said
                and counts[_shape(said[-1][1])] == 1
                and _WORDS.search(_shape(said[-1][1]).replace(f"ank {rank}", ""))
            ):
                return log, *said[-1]
        return None

    def _find_weak(self) -> Cause | None:
        """What a shell, or the program itself, says of errors, where nothing else is known and the job has failed."""
        is_bad = bool(self._has_failed) or bool(self._exit_status) or bool(self._ends)
        said = [mark for mark in self._of(RAISED) if not mark.is_raised]
        weak = [mark for mark in self._of(WEAK) if mark.cause != "singletons" and "\n" not in mark.body]
        weak = [mark for mark in weak if not MAY_BE_MISSING.search(mark.text) or self._is_last(mark)]
        ran = self._has_run
        if not ran and self._has_failed is None:  # a job script that ended with an error of a program in it
            is_bad = is_bad or any(self._is_last(mark) for mark in (*said, *weak))
        ended = [mark for mark in (*said, *weak) if ran and _COMMAND.match(mark.text) and self._is_last(mark)]
        if ended and self._has_failed is None:  # behind the ranks
            return self._cause(ended[-1], None)
        if said and is_bad:
            return self._cause(said[-1], said[-1].rank)
        if weak and not ran and (is_bad or self._has_failed is None):
            return self._cause(weak[-1], None)
        return None

    def _is_last(self, mark: Mark) -> bool:
        """Whether its log ends with it, as that of ranks which are ended while they wait."""
        log = self._logs[mark.log]
        by = _COMMAND.match(mark.text)
        below = (
            log.lines[at] for at in range(mark.number - log.skipped, len(log.lines))
        )  # of which most end it at once
        return all(by is not None and line.startswith(by[0].encode()) for line in below if line.strip())

    def _cause(self, mark: Mark, rank: int | str | None) -> Cause:
        log = self._logs[mark.log]
        row = mark.row
        where = f"look at {mark.frame}" if mark.frame else "look at the traceback above the line"
        remedy = f"{where}: {fill_remedy(row, mark.body)}" if row is not None and mark.frame else where
        if row is not None and not mark.frame:
            remedy = fill_remedy(row, mark.body)
        host = mark.host or self._find_host(rank)
        whose = row.whose if row is not None else PROGRAM
        return Cause(mark.cause, rank, host, log.source.path, mark.number, mark.text, whose, remedy)

    def _find_host(self, rank: int | str | None) -> str:
        named = [mark.host for mark in self._ends if mark.host and mark.rank == rank and rank is not None]
        return next((log.source.host for log in self._logs if log.source.host and log.source.rank == rank), "") or next(
            iter(named), ""
        )


def _signal(mark: Mark) -> int:
    return mark.signal or max((mark.status or 0) - 128, 0)


def _shape(line: str) -> str:
    return re.sub(r"\d+(\.\d+)?(e[+-]\d+)?", "#", line)


def _find_any_remedy(cause: str) -> str:
    return next((row.remedy for row in ROWS if row.cause == cause and row.remedy), "")
