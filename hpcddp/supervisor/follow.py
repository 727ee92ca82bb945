"""The job that follows in a chain: queued before the ranks start, so that no kill breaks the chain, and cancelled when
nothing is left to do or the owner ends the chain."""

from __future__ import annotations

import os
import shlex
import time

from hpcddp.errors import SchedulerError
from hpcddp.record import TYPE_CHECKING
from hpcddp.runs.chain import find_follow_up, write_follow_up
from hpcddp.schedulers.registry import find_scheduler
from hpcddp.schedulers.run import run_program
from hpcddp.supervisor.asked import ask_beside
from hpcddp.supervisor.job import is_waiting, is_wish

if TYPE_CHECKING:
    import signal
    from _queue import SimpleQueue
    from collections.abc import Callable, Mapping

    from hpcddp.runs.folder import AttemptFolder
    from hpcddp.schedulers.registry import CurrentJob
    from hpcddp.supervisor.job import End
else:
    import _signal as signal

#: The signals with which an owner ends a job.
_ENDING = (signal.SIGTERM, signal.SIGINT)


class FollowUp:
    """The follow-up of one job. `id`: as its scheduler printed it; None: there is none."""

    def __init__(self, job: CurrentJob, end: End, env: Mapping[str, str], tell: Callable[[str], None]) -> None:
        self.id: str | None = None
        self._job = job
        self._end = end
        self._env = env
        self._tell = tell
        self._commands = find_scheduler(job.scheduler).commands
        self._deciding: SimpleQueue[None] | None = None

    def queue(self, attempt: AttemptFolder, options: tuple[str, ...]) -> None:
        """Queue it, and write its id into the attempt's folder; a job that was started again has done so already."""
        queued = find_follow_up(attempt)
        if queued is None or not is_waiting(self._job.scheduler, queued, self._env):
            queued = self._submit(attempt.script, options)
        if queued is None:
            return
        self.id = queued
        try:
            write_follow_up(attempt, queued)
        except OSError as error:
            self.cancel(f"{attempt.next} cannot be written: {error.strerror}")
            return
        end = shlex.join([*self._commands.cancel, self._job.id])
        self._tell(f"job {queued} follows this one and resumes the run; to end both: {end}")

    def hear(self, number: int) -> None:
        """A signal came: if the owner ends this job, the chain ends with it. That is found out beside the supervisor,
        since the ranks may be saving."""
        is_decided = self._deciding is None or not self._deciding.empty()
        if number in _ENDING and self.id is not None and is_decided:
            came = time.time()
            self._deciding = ask_beside(lambda: self._end_chain(came))

    def settle(self) -> None:
        """Wait until it is known what becomes of the chain after the signals that came."""
        if self._deciding is not None:
            self._deciding.get()
            self._deciding = None

    def cancel(self, why: str) -> None:
        """Take it back, if there is one. If that fails, it will see by itself that nothing is left to do."""
        self.settle()
        self._cancel(why)

    def is_waiting(self) -> bool:
        """Whether it is there, and was not deleted meanwhile."""
        self.settle()
        return self.id is not None and is_waiting(self._job.scheduler, self.id, self._env)

    def _end_chain(self, came: float) -> None:
        if is_wish(self._job, self._end, self._env, came):
            self._cancel("somebody ends this job long before its end, and with it the chain")

    def _cancel(self, why: str) -> None:
        if self.id is None:
            return
        words = [*self._commands.cancel, self.id]
        try:
            done = run_program(words, self._env).status == 0
        except SchedulerError:
            done = False
        by_hand = f"{self.id} is still queued; to take it back: {shlex.join(words)}"
        self._tell(f"{why}: {f'{self.id} is cancelled' if done else by_hand}")
        self.id = None

    def _submit(self, script: str, options: tuple[str, ...]) -> str | None:
        from hpcddp.schedulers.commands import find_id  # most jobs start without it

        words = list[str]()
        for word in self._commands.follow:
            filled = word.replace("{job}", self._job.id).replace("{script}", script)
            words += options if word == "{options}" else [filled]
        folder = self._env.get(find_scheduler(self._job.scheduler).variables.folder) or os.getcwd()
        why = "there is no copy of this script" if not os.path.isfile(script) else ""
        if not why:
            try:
                answer = run_program(words, self._env, folder=folder)
                queued = find_id(self._commands.submitted, answer)
                if queued is not None:
                    return queued
                no_id = f"{words[0]} answered {' '.join(answer.stdout.split())[-200:]!r}, which has no job id"
                why = no_id if answer.status == 0 else answer.stderr.strip() or f"{words[0]} ended with {answer.status}"
            except SchedulerError as error:
                why = error.message
        self._tell(f"the next attempt is not queued: {why}\nhint: on a login node: cd {folder} && {shlex.join(words)}")
        return None
