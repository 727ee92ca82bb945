"""What `hpcddp watch` shows of a run: from its folder at each look, and from its scheduler, which is asked as seldom as
`hpcddp status --watch` asks it, however often somebody looks."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress

from hpcddp.errors import HpcddpError
from hpcddp.login.find_cause import send_notices
from hpcddp.login.judge import Answers, ask_schedulers, judge, say_end
from hpcddp.login.on_disk import OnDisk, read_on_disk
from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.runs.folder import MANIFEST, RunFolder, list_checkpoints, step_of
from hpcddp.runs.logs import order_attempts
from hpcddp.runs.metrics import Latest, LossCurve
from hpcddp.runs.submitted import JobEnd, read_job_end
from hpcddp.supervisor.follow import ask_in_thread

if TYPE_CHECKING:
    from _queue import SimpleQueue

ASK_S = 30.0  # between two questions to a scheduler, of one person who looks
_TAIL = 16384  # bytes of the log, whose lines are shown


class WatchedAttempt(Record):
    """`steps`: the first and the last that it has made; None: none is recorded. `end`: why it ended; "": it runs."""

    name: str
    steps: tuple[int, int] | None
    end: str


class Watched(Record):
    """`state` and `why`: as `RunStatus` has them. `saved`: the newest checkpoint's step, and its age in seconds. `end`:
    of the job; None: no supervisor has said it. `time`: of this look, in seconds since 1970."""

    name: str
    state: str
    why: str
    job: str
    latest: Latest
    saved: tuple[int, float] | None
    end: JobEnd | None
    attempts: tuple[WatchedAttempt, ...]
    log: tuple[str, ...]
    problem: str
    time: float


class Watcher:
    """Looks at one run again and again. `curve` is the one of the last look."""

    def __init__(self, run: RunFolder, env: Mapping[str, str]) -> None:
        self._run, self._env = run, env
        self._answers = Answers()
        self._question: tuple[object, ...] = ()  # the jobs that were asked about, and what the folder said then
        self._question_at = 0.0
        self._asking: SimpleQueue[Answers | None] | None = None
        self._sent_at = 0.0
        self.curve = LossCurve()

    def look(self) -> Watched:
        """Read the folder now, and the scheduler's last answer. What cannot be found out is in `problem`."""
        one, now = read_on_disk(self._run), time.time()
        attempts = order_attempts(self._run)
        answers = self._ask_schedulers(one)
        problem = one.problem or next(iter(answers.problems.values()), "")
        try:
            self.curve.read(attempts)
        except HpcddpError as error:
            problem = problem or error.message
        status = judge(one, answers).status
        if time.monotonic() - self._sent_at > ASK_S:
            self._sent_at = time.monotonic()
            ask_in_thread(lambda: send_notices(self._run, status, self._env))
        current = None if one.holder is None else self._run.attempt(one.holder.attempt)
        end = None
        with suppress(HpcddpError):
            end = read_job_end(current) if current is not None and status.state == "running" else None
        return Watched(
            os.path.basename(os.path.abspath(self._run.path)),
            status.state,
            status.why,
            status.job,
            one.latest,
            _find_saved(self._run, now),
            end,
            tuple(WatchedAttempt(of.name, self.curve.made.get(of.name), say_end(one, of, status)) for of in attempts),
            _read_tail(current.log) if current is not None else (),
            problem,
            now,
        )

    def _ask_schedulers(self, one: OnDisk) -> Answers:
        """The scheduler's last answer. It is asked in a thread, and at once about a job that it has not shown."""
        jobs = {(job.scheduler, job.id) for job in one.jobs}
        question = (frozenset(jobs), one.holder, one.ended)
        if self._asking is not None and not self._asking.empty():
            self._answers, self._asking = self._asking.get() or self._answers, None
        if not self._question or question[0] != self._question[0]:
            self._answers, self._asking = ask_schedulers([one], self._env), None
            self._question, self._question_at = question, time.monotonic()
        elif self._asking is None and (time.monotonic() - self._question_at > ASK_S or question != self._question):
            self._question, self._question_at = question, time.monotonic()
            self._asking = ask_in_thread(lambda: ask_schedulers([one], self._env))
        return self._answers


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
