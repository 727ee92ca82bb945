"""What `hpcddp watch` shows of a run: from its folder each time, and from its scheduler, which is asked seldom."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress

from hpcddp.errors import HpcddpError
from hpcddp.login.judge import Answers, RunStatus, ask_schedulers, explain_end, judge
from hpcddp.login.on_disk import OnDisk, read_on_disk
from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.runs.failure import read_log_end
from hpcddp.runs.folder import MANIFEST, RunFolder, list_checkpoints, step_of
from hpcddp.runs.logs import order_attempts
from hpcddp.runs.metrics import LossCurve
from hpcddp.runs.submitted import JobEnd
from hpcddp.supervisor.follow import ask_in_thread

if TYPE_CHECKING:
    from _queue import SimpleQueue

ASK_S = 30.0  # between two questions to a scheduler


class WatchedAttempt(Record):
    """`steps`: the first and the last that it has made; None: none is recorded. `end`: why it ended; "": it runs."""

    name: str
    steps: tuple[int, int] | None
    end: str


class Look(Record):
    """A look at a run. `saved`: the newest checkpoint's step, and its age in seconds. `end`: of its job. `time`: in
    seconds since 1970."""

    status: RunStatus
    saved: tuple[int, float] | None
    end: JobEnd | None
    attempts: tuple[WatchedAttempt, ...]
    log: tuple[str, ...]
    problem: str
    time: float


class Watcher:
    def __init__(self, run: RunFolder, env: Mapping[str, str]) -> None:
        self._run, self._env = run, env
        self._answers = Answers()
        #: the jobs that were asked about, and what the folder said then
        self._question: tuple[object, ...] = (None, None, None)
        self._question_at = 0.0
        self._asking: SimpleQueue[Answers | None] | None = None
        self.curve = LossCurve()

    def poll(self) -> Look:
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
        steps = self.curve.made
        return Look(
            status,
            _find_saved(self._run, now),
            one.job_end,
            tuple(WatchedAttempt(of.name, steps.get(of.name), explain_end(one, of, status)) for of in attempts),
            _read_tail(one.attempt.log) if one.attempt is not None else (),
            problem,
            now,
        )

    def _ask_schedulers(self, one: OnDisk) -> Answers:
        """The scheduler's last answer. It is asked in a thread, but at once about a job that is new."""
        now, question = time.monotonic(), (frozenset(job.id for job in one.jobs), one.holder, one.ended)
        if self._asking is not None and not self._asking.empty():
            self._answers, self._asking = self._asking.get() or self._answers, None
        is_new = question[0] != self._question[0]
        if is_new or (self._asking is None and (now - self._question_at > ASK_S or question != self._question)):
            self._question, self._question_at = question, now
            self._asking = None if is_new else ask_in_thread(lambda: ask_schedulers([one], self._env))
        if is_new:
            self._answers = ask_schedulers([one], self._env)
        return self._answers


def _find_saved(run: RunFolder, now: float) -> tuple[int, float] | None:
    with suppress(HpcddpError):
        for checkpoint in reversed(list_checkpoints(run.checkpoints)):
            with suppress(OSError):  # it was removed meanwhile
                written = os.stat(os.path.join(checkpoint, MANIFEST)).st_mtime
                return step_of(checkpoint), max(now - written, 0.0)
    return None


def _read_tail(path: str) -> tuple[str, ...]:
    """The last lines of a log; of a progress bar its last form."""
    lines = read_log_end(path, 0).split("\n")
    return tuple(line.rstrip("\r").rpartition("\r")[2] for line in lines if line.strip())
