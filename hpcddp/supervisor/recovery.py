"""Whether a job goes on after ranks were lost, and on which of its hosts; and the next attempt of the same job."""

from __future__ import annotations

import errno
import os
import time

from hpcddp.errors import HpcddpError
from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.runs.chain import find_follow_up, list_opened, start_attempt, write_follow_up
from hpcddp.runs.command import identify_command
from hpcddp.runs.folder import list_attempts, list_checkpoints, number_attempt, show_path, step_of
from hpcddp.runs.jsonfile import read_object, write_object
from hpcddp.runs.lock import release_run
from hpcddp.runs.start import hold
from hpcddp.runs.state import read_state, replace_state
from hpcddp.supervisor.events import ERROR, KILLED, STUCK, UNHEARD, UNKNOWN
from hpcddp.supervisor.hosts import Hosts, list_checks
from hpcddp.supervisor.rank import NOWHERE
from hpcddp.supervisor.start_end import make_folders
from hpcddp.units import format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hpcddp.runs.folder import AttemptFolder, RunFolder
    from hpcddp.schedulers.registry import CurrentJob
    from hpcddp.supervisor.events import Event
    from hpcddp.supervisor.follow import End
    from hpcddp.supervisor.order import Order

_MOST_STUCK = 2  # as often as a host has to be blamed before it is left out
_MOST_CRASHES = 2  # the same
_MOST_ERRORS, _MOST_BLIND_ERRORS = 1, 2  # alike, of the program; where nobody says how far it was
_FULL_TRIES = 120  # to write to a run folder that is full, after the first one: ten minutes
_LEAST_LEFT_S = 60  # before the job's end: a start and a step would not fit


class Saved(Record):
    """A checkpoint. `nth`: of the job's runs, its own being the first; 0: there is none, and `step` is what the ranks
    said."""

    nth: int
    step: int


class Recovery:
    """What has happened to one job, and what is done about it."""

    def __init__(
        self,
        order: Order,
        job: CurrentJob,
        env: Mapping[str, str],
        tell: Callable[[str], None],
    ) -> None:
        self._order, self._job, self._env, self._tell = order, job, env, tell
        self._hosts = Hosts(job, env, list_checks(order), tell)
        self._restarts = 0
        self._fits = (*order.fewer_nodes, order.line.nodes)
        self.is_too_few = False  # the program has refused the number of nodes that are left, not the request's
        self.is_full = False  # the run folder, at the last try to begin again
        self._full_tries = 0
        self._next: AttemptFolder | None = None
        self._stuck: list[tuple[str, int]] = []  # where, step
        self._opened: list[RunFolder] = []  # that the job's script has opened
        self._crashes: list[tuple[str, int, int, Saved]] = []  # kind, status, step, the newest checkpoint
        self._failures: list[tuple[str, int, int, Saved]] = []  # text, step, how many runs were opened, how far
        names, nodes = self._hosts.names, order.line.nodes
        self.chosen = names[:nodes] if len(names) > nodes else ()  # (): as the script has it

    def goes_on(self, attempt: AttemptFolder, cause: Event, end: End, suspects: set[str]) -> bool:
        """Whether the ranks are started again, on the hosts `chosen` then; why not is printed. `suspects`: hosts that
        the attempt has lost."""
        self._full_tries = 0
        self._tell(f"the first cause: {cause}")
        why_not = self._judge(attempt, cause, end)
        if why_not:
            self._tell(f"the ranks are not started again: {why_not}")
            return False
        # a broken GPU shows as an error, too: a bug would come again at the same step, or on other hosts
        is_of_host = (cause.is_loss or cause.kind == ERROR) and cause.kind != UNHEARD and not self.is_too_few
        if is_of_host and cause.host and cause.is_sure and not cause.is_of_another:
            self._hosts.blame(cause.host)
        if self._hosts.names:
            usable = self._hosts.find_usable(attempt, suspects)
            self.chosen = self._hosts.choose(usable, self._fits)
            if not self.chosen:
                fits = " or ".join(map(str, self._fits))
                self._tell(
                    f"the ranks are not started again: of {format_count(len(self._hosts.names), 'host')}"
                    f" {len(usable)} can be used, and this job can go on with {fits}"
                )
                return False
        elif unwell := self._hosts.check_here(attempt):
            self._tell(f"the ranks are not started again: {unwell}")
            return False
        self._restarts += 1
        return True

    def _judge(self, attempt: AttemptFolder, cause: Event, end: End) -> str:
        """Why the ranks are not started again; empty: they are."""
        self._opened += [run for run in list_opened(attempt) if run not in self._opened]
        saved = self._find_newest(attempt)
        before, is_of_program = self._failures, not cause.is_loss
        # programs may save elsewhere, and need not say their steps
        reached = saved if saved.step else Saved(0, cause.step)
        if is_of_program:  # lost ranks and hosts do not count
            self._failures = [*before, (cause.text, cause.step, len(self._opened), reached)]
        self.is_too_few = cause.is_refusal and 0 < len(self.chosen) < self._order.line.nodes
        if end.at is not None and time.time() > end.at - _LEAST_LEFT_S:
            return "the job ends soon"
        if self._restarts >= self._order.max_restarts:
            return f"they were already, {format_count(self._restarts, 'time')} (max_restarts)"
        if self.is_too_few:
            count = len(self.chosen)
            self._fits = tuple(number for number in self._fits if number < count)
            return "" if self._fits else f"the program does not work out on {count}, and fewer are not allowed"
        if cause.is_mistake:
            return "that is no node's fault"
        if cause.kind == STUCK and (cause.step or cause.text != NOWHERE):
            same = self._stuck.count((cause.text, cause.step))
            self._stuck.append((cause.text, cause.step))
            if same >= _MOST_STUCK:
                return f"no rank got on at the same place and step {same} times before"
        is_crash = cause.kind == KILLED or (cause.kind == ERROR and cause.is_loss)
        if is_crash and (cause.step or cause.is_by_itself):
            why = self._judge_crash(cause, saved)
            if why:
                return why
        return self._judge_errors(before, cause, reached) if is_of_program else ""

    def _judge_crash(self, cause: Event, saved: Saved) -> str:
        crash = (cause.kind, cause.status, saved)
        steps = [at for kind, status, at, before in self._crashes if (kind, status, before) == crash]
        self._crashes.append((cause.kind, cause.status, cause.step, saved))
        # the step that a rank sent last may be some behind where it crashed
        alike = [at for at in steps if at == cause.step or (cause.is_by_itself and (saved.step or at > cause.step))]
        if len(alike) < _MOST_CRASHES:
            return ""
        where = f"at step {cause.step}" if cause.step else "before any step was known"
        where = where if {*alike} == {cause.step} else "without a new checkpoint"
        return f"ranks ended alike {where} {len(alike)} times before: no other host would help"

    def _judge_errors(self, before: list[tuple[str, int, int, Saved]], cause: Event, reached: Saved) -> str:
        alike = [(text, at, opened) == (cause.text, cause.step, len(self._opened)) for text, at, opened, _ in before]
        if not reached.step and cause.kind != UNKNOWN:  # a launcher that failed by itself has no step
            if len(alike) >= _MOST_BLIND_ERRORS and all(alike[-_MOST_BLIND_ERRORS:]):
                return "the same error came three times, and no step is known between them: it would come again"
            return ""
        if alike.count(True) >= _MOST_ERRORS:
            at = f" at step {cause.step}" if cause.step else ""
            return f"the same error came twice{at}: it would come again"
        last = [saved for *_, saved in before[-2:]]
        if len(last) == 2 and min(last) >= reached:
            return f"two starts have made no progress beyond step {max(last).step}"
        return ""

    def begin_again(self, attempt: AttemptFolder) -> AttemptFolder | None:
        """The next attempt, which takes the run from this one: whatever is left of it writes no more. None if that
        cannot be done, and why is printed: another job has taken the run, or its folder is full. `is_full`: it may have
        room again in a moment."""
        new = self._next if self._full_tries else None
        try:
            new = self._next = new or attempt.run.attempt(number_attempt(attempt.run, self._job.name))
            self._take_over(attempt, new)
        except (HpcddpError, OSError) as error:
            self._note_failure(attempt, error)
        else:
            self._tell_start(new)
            return new
        if new is not None:
            release_run(new.run, new.name)  # it may hold the run already
        return None

    def _note_failure(self, attempt: AttemptFolder, error: HpcddpError | OSError) -> None:
        below = error if isinstance(error, OSError) else error.__cause__
        full = isinstance(below, OSError) and below.errno in {errno.ENOSPC, errno.EDQUOT}
        self.is_full = full and self._full_tries < _FULL_TRIES
        self._full_tries += 1
        why = str(error)
        if isinstance(error, OSError):
            why = f"the run folder cannot be written, {error.filename or attempt.run.path}: {error.strerror}"
        if not self.is_full:
            self._tell(f"the ranks are not started again: {why}")
        elif self._full_tries == 1:
            self._tell(f"the ranks cannot be started again yet, which is tried for ten minutes: {why}")

    def _find_newest(self, attempt: AttemptFolder) -> Saved:
        """The newest checkpoint of the run that was begun last, of those that have one."""
        for nth, run in reversed([*enumerate((attempt.run, *self._opened), 1)]):
            saved = list_checkpoints(run.checkpoints)
            if saved:
                return Saved(nth, step_of(saved[-1]))
        return Saved(0, 0)

    def _tell_start(self, attempt: AttemptFolder) -> None:
        where = f" on {', '.join(self.chosen)}" if self.chosen else ""
        nth, step = self._find_newest(attempt)
        since = f", from step {step}" if step else ""
        since += f" of {show_path(self._opened[nth - 2].path)}" if nth > 1 else ""
        by_runtime = any(os.path.exists(one.metrics) for one in list_attempts(attempt.run))
        if not step and by_runtime:  # else its checkpoints, if it has any, are its own
            since = ", from the start: there is no checkpoint yet"
        self._tell(f"start {self._restarts + 1} of at most {self._order.max_restarts + 1}{where}{since}")

    def _take_over(self, attempt: AttemptFolder, new: AttemptFolder) -> None:
        run, order = attempt.run, self._order
        command = identify_command(order.line.command)
        hold(new, self._env, command, process=os.getpid())
        if order.chain:
            start_attempt(new, order.chain)
        make_folders(new)
        queued = find_follow_up(new)
        if queued is not None:
            write_follow_up(new, queued)
        nodes, each = len(self.chosen) or order.line.nodes, order.line.ranks_per_node
        size = {"nodes": nodes, "world_size": each and nodes * each}
        write_object(run.plan, {**(read_object(run.plan) or {}), **size})
        state = read_state(run)
        if state is not None and state.attempt == attempt.name and state.status == "unfinished":
            # the last that is written: what is there is the new one's, as for a chain
            replace_state(run, state._replace(attempt=new.name))
