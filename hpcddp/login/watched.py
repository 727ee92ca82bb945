"""What `hpcddp watch` shows of a run: all of it from the run's folder, so that no scheduler is asked however often
somebody looks."""

from __future__ import annotations

import os
import time
from contextlib import suppress

from hpcddp.errors import HpcddpError
from hpcddp.login.find_run import read_follow_up
from hpcddp.login.run_facts import RunFacts, read_facts
from hpcddp.record import Record
from hpcddp.runs.folder import MANIFEST, AttemptFolder, RunFolder, list_checkpoints, list_holders, step_of
from hpcddp.runs.holder import describe_process, has_ended
from hpcddp.runs.job_end import JobEnd, read_job_end
from hpcddp.runs.jsonfile import read_object, read_text
from hpcddp.runs.latest import Latest, read_latest
from hpcddp.runs.lock import read_end, read_holder
from hpcddp.runs.logs import order_attempts
from hpcddp.runs.loss_curve import LossCurve
from hpcddp.runs.state import correct_killed
from hpcddp.supervisor.end import UNFINISHED

_TAIL = 16384  # bytes of the log, whose lines are shown


class HostSpeed(Record):
    """`samples_per_s`: the host's part of the speed, by its ranks; None: not recorded."""

    host: str
    ranks: int
    samples_per_s: float | None


class AttemptSeen(Record):
    """`steps`: the first and the last that it has made; None: none is recorded. `end`: why it ended; "": it runs."""

    name: str
    steps: tuple[int, int] | None
    end: str


class Watched(Record):
    """`state`: waiting, running, unfinished, finished, failed, or unknown; `why` goes with it. `saved`: the newest
    checkpoint's step, and its age in seconds. `end`: of the job; None: no supervisor has said it. `time`: of this look,
    in seconds since 1970."""

    name: str
    state: str
    why: str
    job: str
    latest: Latest
    hosts: tuple[HostSpeed, ...]
    saved: tuple[int, float] | None
    end: JobEnd | None
    attempts: tuple[AttemptSeen, ...]
    log: tuple[str, ...]
    problem: str
    time: float


class Watcher:
    """Looks at one run again and again. `curve` is the one of the last look."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self.curve = LossCurve()
        self._ranks: dict[str, dict[str, int]] = {}  # attempt -> host -> ranks

    def look(self) -> Watched:
        """What the folder says now. What cannot be read is in `problem`."""
        facts, now = read_facts(self._run), time.time()
        attempts = order_attempts(self._run)
        problem = facts.problem
        try:
            self.curve.read(attempts)
        except HpcddpError as error:
            problem = problem or error.message
        state, why = _judge(facts, attempts)
        current = attempts[-1] if attempts else None  # hpcddp 0.1 did not say which one holds the run
        latest = facts.latest
        if facts.holder is not None:
            current = self._run.attempt(facts.holder.attempt)
        elif current is not None:
            latest = read_latest(current.metrics)
        end = None
        with suppress(HpcddpError):
            end = read_job_end(current) if current is not None and state == "running" else None
        return Watched(
            os.path.basename(os.path.abspath(self._run.path)),
            state,
            why,
            _name_job(facts),
            latest,
            self._read_hosts(current, latest.samples_per_s),
            _find_saved(self._run, now),
            end,
            tuple(self._describe(attempt, facts, state, why) for attempt in attempts),
            _read_tail(current.log) if current is not None else (),
            problem,
            now,
        )

    def _describe(self, attempt: AttemptFolder, facts: RunFacts, state: str, why: str) -> AttemptSeen:
        is_last = facts.holder is not None and facts.holder.attempt == attempt.name
        end = _read_lost(attempt) or ("" if state == "running" and is_last else _how_ended(self._run, attempt))
        if is_last and state in {"unfinished", "finished", "failed"} and why and not os.path.exists(attempt.lost):
            end = why
        return AttemptSeen(attempt.name, self.curve.made.get(attempt.name), end)

    def _read_hosts(self, attempt: AttemptFolder | None, speed: float | None) -> tuple[HostSpeed, ...]:
        """Rank 0 records the speed of all ranks together. Every data rank has an even part of each step's samples, and
        each step ends on all of them at once: a host's speed is what its ranks have of the whole."""
        if attempt is None:
            return ()
        ranks = self._ranks.get(attempt.name) or _count_ranks(attempt)
        self._ranks[attempt.name] = ranks
        all_ranks = sum(ranks.values())
        return tuple(
            HostSpeed(host, count, None if speed is None else speed * count / all_ranks)
            for host, count in ranks.items()
        )


def _judge(facts: RunFacts, attempts: list[AttemptFolder]) -> tuple[str, str]:
    """The state and why. A job on another machine runs until its folder says that it ended: its scheduler would know
    better, and `hpcddp status` asks it."""
    holder, state = facts.holder, facts.state
    if holder is None:
        if facts.submissions:
            return "waiting", f"job {facts.submissions[-1].job} was submitted; hpcddp status asks its scheduler"
        return (state.status, state.reason) if state is not None else ("unknown", "no job of this run is known")
    gone = False
    if not facts.ended:
        mine = describe_process("", os.getpid(), {}, ())
        seen = has_ended(holder, mine, lambda _scheduler, _job: None)
        if not seen:
            return "running", "" if seen is False else f"on {holder.host}, as its folder says"
        gone = True
    if state is not None and state.status == "finished" and not facts.left:
        return "finished", state.reason
    follows = read_follow_up(attempts[-1].next) if attempts else ""
    if follows and follows in {job for _, job in facts.open_jobs}:
        return "waiting", f"job {follows} is to follow; hpcddp status asks its scheduler"
    if facts.left:
        return "unfinished", facts.left
    if state is not None:
        state = correct_killed(facts.run, state, lambda: False)
        return state.status, state.reason
    if gone or facts.exit_status is None:
        return "failed", "it was killed: it left no exit status, and no state"
    return ("failed", f"exit status {facts.exit_status}") if facts.exit_status else ("finished", "")


def _name_job(facts: RunFacts) -> str:
    if facts.holder is not None:
        return facts.holder.job or facts.holder.attempt
    return facts.submissions[-1].job if facts.submissions else ""


def _read_lost(attempt: AttemptFolder) -> str:
    with suppress(OSError, HpcddpError):
        return read_text(attempt.lost).strip().partition("\n")[0]
    return ""


def _how_ended(run: RunFolder, attempt: AttemptFolder) -> str:
    """By what its holder left."""
    for path in list_holders(run):
        with suppress(HpcddpError):
            holder = read_holder(path)
            if holder is not None and holder.attempt == attempt.name:
                ended, status = read_end(path)
                if not ended:
                    return "it left no exit status"
                more = ", unfinished" if status == UNFINISHED else ""
                return f"exit status {status}{more}" if status else "ended"
    return "ended"


def _count_ranks(attempt: AttemptFolder) -> dict[str, int]:
    """Ranks by host, as the training runtime records them."""
    counts: dict[str, int] = {}
    with suppress(HpcddpError, AttributeError, TypeError):
        for rank in (read_object(attempt.versions) or {}).get("ranks") or []:
            host = str(rank.get("host"))
            counts[host] = counts.get(host, 0) + 1
    return counts


def _find_saved(run: RunFolder, now: float) -> tuple[int, float] | None:
    with suppress(HpcddpError):
        for checkpoint in reversed(list_checkpoints(run.checkpoints)):
            with suppress(OSError):  # it was removed meanwhile
                written = os.stat(os.path.join(checkpoint, MANIFEST)).st_mtime
                return step_of(checkpoint), max(now - written, 0.0)
    return None


def _read_tail(path: str) -> tuple[str, ...]:
    """The last lines of a log; of one that is written over again and again, as a progress bar is, its last form."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(size - _TAIL, 0))
            text = file.read()
    except OSError:
        return ()
    lines = text.decode(errors="replace").split("\n")
    whole = lines[1:] if size > _TAIL and len(lines) > 1 else lines
    return tuple(line.rstrip("\r").rpartition("\r")[2] for line in whole if line.strip())
