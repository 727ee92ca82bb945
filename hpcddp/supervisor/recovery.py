"""Whether a job goes on after ranks were lost, on which of its hosts, and as which attempt."""

from __future__ import annotations

import os
import shlex
import shutil
import time

from hpcddp.errors import HpcddpError
from hpcddp.ranks.gpus import MEMORY_REPORT, NEEDS_RESET
from hpcddp.ranks.remote_shell import SSH
from hpcddp.record import TYPE_CHECKING
from hpcddp.runs.chain import find_follow_up, list_opened, start_attempt, write_follow_up
from hpcddp.runs.command import identify_command
from hpcddp.runs.folder import MANIFEST, cannot_write, list_checkpoints, number_attempt, step_of
from hpcddp.runs.lock import release_run
from hpcddp.runs.start import hold
from hpcddp.runs.state import read_plan_file, read_state, replace_state, write_plan_file
from hpcddp.schedulers.allocation import is_address, is_this_host, same_host
from hpcddp.schedulers.registry import find_scheduler, list_hosts
from hpcddp.schedulers.run import ask_job, run_and_find_failures, run_program
from hpcddp.supervisor.events import ERROR, UNHEARD
from hpcddp.supervisor.leftover import kill_command
from hpcddp.supervisor.start_end import make_folders
from hpcddp.units import format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from hpcddp.runs.folder import AttemptFolder, RunFolder
    from hpcddp.schedulers.registry import CurrentJob
    from hpcddp.supervisor.events import Event
    from hpcddp.supervisor.follow import EndTime
    from hpcddp.supervisor.order import Order

_LEAST_LEFT_S = 60  # before the job's end: a start and a step would not fit
_PROBE_S, _SUSPECT_S = 30.0, 5.0  # a host that has been silent before has less
_MOST_BLAMED = 2  # attempts that failed on a host
_TRIES, _PAUSE_S = 5, 2.0  # Slurm answers now and then that it is not ready
#: What a host has to be able to do, for a shell, without Python and its modules: with the run folder, the newest
#: checkpoint's manifest ("": there is none) and the number of GPUs. A parallel file system may be mounted again to be
#: read alone, after an error. No driver is no fault.
_ABLE = f"""\
file=$1/.written-by-$(uname -n).$$
touch "$file" && rm -f "$file" || exit 11
test ! "$2" || head -c 1 "$2" || exit 12
test "$3" -gt 0 && command -v nvidia-smi || exit 0
test "$(nvidia-smi -L | grep -c '^GPU ')" -ge "$3" || exit 13
! {shlex.join(MEMORY_REPORT)} | grep -E {shlex.quote(NEEDS_RESET)} || exit 13"""
_UNABLE = {
    11: "it does not see the run folder, or cannot write to it",
    12: "it cannot read the newest checkpoint",
    13: "it does not have the job's GPUs, or one of them needs a reset",
}


class Recovery:
    """Decides what follows an attempt of one job: the end, a restart, or other hosts. `names`: all hosts of the job,
    spare ones too, the host of the script first, which is alone where no scheduler names the others. `chosen`: those
    of the next start; (): as the script has it."""

    def __init__(self, order: Order, job: CurrentJob, env: Mapping[str, str], emit: Callable[[str], None]) -> None:
        self._order, self._job, self._env, self._emit = order, job, env, emit
        self._commands = find_scheduler(job.scheduler).commands
        self._starter = self._find_starter()
        self._restarts = 0
        self._node_counts = (*order.fewer_nodes, order.line.nodes)  # that the job can run on
        self._opened: list[RunFolder] = []  # that the job's script has opened
        self._ends = set[tuple[object, ...]]()  # how the attempts so far have ended
        self._left_out: set[str] = set()
        self._blamed: dict[str, int] = {}
        self.names = (list_hosts(env) if job.id else ()) or (os.uname().nodename,)
        self.chosen = self.names[: order.line.nodes] if len(self.names) > order.line.nodes else ()

    def start_without(self, unfit: Mapping[str, str]) -> bool:
        """Whether the ranks can be started, on the hosts `chosen` then, without these, each of which has its reason."""
        for name in self.names:
            why = next((why for host, why in unfit.items() if same_host(name, host)), None)
            if why is not None:
                self._leave_out(name, why)
        self.chosen = self._choose()
        return bool(self.chosen)

    def prepare_restart(self, attempt: AttemptFolder, cause: Event, end: EndTime, suspects: set[str]) -> str:
        """Choose the hosts on which the ranks are started again, and kill what this attempt has left there. Why they
        are not started again; empty: they are. `suspects`: hosts that the attempt has lost."""
        self._emit(f"the first cause: {cause}")
        self._opened += [run for run in list_opened(attempt) if run not in self._opened]
        if end.at is not None and time.time() > end.at - _LEAST_LEFT_S:
            return "the job ends soon"
        if self._restarts >= self._order.max_restarts:
            return f"they were already, {format_count(self._restarts, 'time')} (max_restarts)"
        if cause.is_mistake:
            return "that is no node's fault"
        before = self._hosts
        self._blame_host(cause)
        self._leave_out_silent(suspects)
        if self._starter or len(self.names) == 1:
            self._kill_leftovers(attempt)
            self._leave_out_unfit(attempt.run)
        usable, count = self._usable, len(self.names)
        self.chosen = self._choose() if count > 1 else ()
        if not (self.chosen if count > 1 else usable):
            fits = " or ".join(map(str, self._node_counts))
            return f"of {format_count(count, 'host')} {len(usable)} can be used, and this job can go on with {fits}"
        newest = self._list_newest(attempt)
        attempt_end = cause.kind, cause.status, cause.text, cause.step, newest
        # at the same step and with the same newest checkpoints; where neither is known, by an error of the program
        is_repeat = attempt_end in self._ends and (cause.step or newest or cause.is_by_program)
        self._ends.add(attempt_end)
        if is_repeat and self._hosts == before:
            return "an earlier start ended the same way, on the same hosts and without a new checkpoint"
        return ""

    @property
    def _hosts(self) -> tuple[str, ...]:
        return self.chosen or self.names

    @property
    def _usable(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if name not in self._left_out)

    def _choose(self) -> tuple[str, ...]:
        """As many usable hosts as the job can run on, without those that were blamed twice if it works out without
        them. Empty: it does not work out."""
        usable, first = self._usable, self.names[0]  # the script is there, and the address of the rendezvous
        good = tuple(name for name in usable if name == first or self._blamed.get(name, 0) < _MOST_BLAMED)
        for candidates in (good, usable):
            count = max((number for number in self._node_counts if number <= len(candidates)), default=0)
            if count:
                return candidates[:count]
        return ()

    def _blame_host(self, cause: Event) -> None:
        # a broken GPU shows as an error, too: a bug would come again at the same step, or on other hosts
        is_of_host = (cause.is_loss or cause.kind == ERROR) and cause.kind != UNHEARD
        if is_of_host and cause.host and cause.is_sure and not cause.is_of_another:
            for name in self.names:
                self._blamed[name] = self._blamed.get(name, 0) + same_host(name, cause.host)

    def _leave_out_silent(self, suspects: set[str]) -> None:
        """Leave out the hosts that do not answer, and give them back to the scheduler."""
        silent = self._find_silent(suspects)
        for name in silent:
            self._leave_out(name, "it does not answer")
        self._give_back(silent)

    def _kill_leftovers(self, attempt: AttemptFolder) -> None:
        """Kill ranks of this attempt that are left on a host, as one whose agent has lost its connection may be."""
        marks = {"HPCDDP_RUN_DIR": attempt.run.path, "HPCDDP_ATTEMPT": attempt.name}
        self._leave_out_failing(kill_command(marks, self._env), {}, "ranks of the last start cannot be ended there")

    def _leave_out_unfit(self, run: RunFolder) -> None:
        """Leave out the hosts that cannot use the run folder or the GPUs, or fail the job file's own check."""
        saved, line = list_checkpoints(os.path.abspath(run.checkpoints)), self._order.preflight
        manifest = os.path.join(saved[-1], MANIFEST) if saved else ""
        manifest = manifest if os.path.isfile(manifest) else ""
        words = ("sh", "-c", _ABLE, "sh", os.path.abspath(run.path), manifest, str(self._order.line.gpus_per_node))
        self._leave_out_failing(words, _UNABLE)
        if line not in {"", "true"}:
            self._leave_out_failing(("sh", "-c", line), {}, "the job file's own check failed", is_believed=True)

    def _leave_out_failing(
        self, words: tuple[str, ...], why: Mapping[int, str], other: str = "a check fails", *, is_believed: bool = False
    ) -> None:
        """Leave out the hosts on which this command fails. `why`: by its status. What fails on every host is wrong
        itself, unless it `is_believed`."""
        failed = self._find_failures(self._usable, words)
        reasons = {name: why.get(status, other) for name, status in failed.items()}
        if not is_believed and failed and len(failed) == len(self._usable):
            self._emit(f"a check fails on each host ({next(iter(reasons.values()))}), and may not work here")
            return
        for name, reason in reasons.items():
            self._leave_out(name, reason)

    def _find_silent(self, suspects: set[str]) -> list[str]:
        """The hosts that do not answer twice; that one of `suspects` was lost counts as the first of the two."""
        others = [name for name in self._usable if not is_this_host(name)]
        suspected = [name for name in others if any(same_host(name, one) for one in suspects)]
        if not others:
            return []
        if not self._starter:
            self._emit("no program is on PATH by which a host can be asked whether it answers (ssh)")
            return suspected
        silent = self._find_failures(others, ("true",), suspected)
        again = self._find_failures([name for name in silent if name not in suspected], ("true",))
        gone = [name for name in silent if name in suspected or name in again]
        if len(gone) == len(others) and len(suspected) < len(others):  # more likely than that all are gone at once
            self._emit(f"no host answers {self._starter[0]}, which may not work here")
            return suspected
        return gone

    def _find_starter(self) -> tuple[str, ...]:
        for words in (self._commands.starter, SSH):
            if words and shutil.which(words[0], path=self._env.get("PATH")):
                return words
        return ()

    def _find_failures(
        self, names: Iterable[str], words: tuple[str, ...], suspected: Iterable[str] = ()
    ) -> dict[str, int]:
        """Run this command on hosts, all at once; those on which it does not end well, and its status there."""
        fill = self._fill
        sent = (shlex.join(words),) if self._starter == SSH else words  # it gives a shell one line
        commands = {name: [*words] if is_this_host(name) else [*fill(self._starter, name), *sent] for name in names}
        patience = {name: _SUSPECT_S if name in suspected else _PROBE_S for name in commands}
        return run_and_find_failures(commands, self._env, patience)

    def _fill(self, words: tuple[str, ...], name: str) -> list[str]:
        left = ",".join(self._usable)
        return [w.replace("{job}", self._job.id).replace("{host}", name).replace("{others}", left) for w in words]

    def _leave_out(self, name: str, why: str) -> None:
        self._left_out.add(name)
        self._emit(f"{name} is left out: {why}")

    def _give_back(self, gone: list[str]) -> None:
        """Give hosts back to the scheduler, which would end a job that has lost one within minutes."""
        words = self._commands.drop
        if not words or not gone or not shutil.which(words[0], path=self._env.get("PATH")):
            return
        job = ask_job(self._job.scheduler, self._job.id, self._env, _PROBE_S)
        for name in gone if "{host}" in words else gone[:1]:
            # a list of hosts may have names with a domain, which PBS refuses, and a host may be several vnodes
            vnodes = dict.fromkeys(vnode for host, vnode in (job.vnodes if job else ()) if same_host(host, name))
            called = [*vnodes] or [name if is_address(name) else name.partition(".")[0]]
            command = [one for word in words for one in (called if word == "{host}" else self._fill((word,), name))]
            for left in reversed(range(_TRIES)):
                why = self._ask_scheduler(command)
                if not why or not left:
                    break
                time.sleep(_PAUSE_S)
            if why:
                self._emit(f"the scheduler did not take {name} out of the job, and may end it: {why}")
            else:
                self._emit(f"{name} given back to the scheduler ({command[0]}), so that the job goes on")

    def _ask_scheduler(self, command: list[str]) -> str:
        """Why the scheduler does not do it; empty: it does."""
        try:  # scontrol writes files where it is started
            answer = run_program(command, self._env, folder=self._env.get("HPCDDP_RUN_DIR"), patience_s=_PROBE_S)
        except HpcddpError as error:
            return error.message
        return answer.stderr.strip() if answer.status else ""

    def _list_newest(self, attempt: AttemptFolder) -> tuple[str, ...]:
        saved = [list_checkpoints(run.checkpoints) for run in (attempt.run, *self._opened)]
        return tuple(paths[-1] for paths in saved if paths)

    def begin_again(self, attempt: AttemptFolder) -> AttemptFolder:
        """The next attempt, which takes the run from this one: whatever is left of it writes no more. HpcddpError if
        that cannot be done: another job has taken the run, or its folder is full."""
        new = attempt.run.attempt(number_attempt(attempt.run, self._job.name))
        try:
            self._take_over(attempt, new)
        except (HpcddpError, OSError) as error:
            release_run(new.run, new.name)  # it may hold the run already
            if isinstance(error, OSError):
                raise cannot_write(attempt.run, error) from error
            raise
        self._restarts += 1
        where, newest = f" on {', '.join(self.chosen)}" if self.chosen else "", self._list_newest(attempt)
        since = f", from step {step_of(newest[-1])}" if newest else ""
        self._emit(f"start {self._restarts + 1} of at most {self._order.max_restarts + 1}{where}{since}")
        return new

    def _take_over(self, attempt: AttemptFolder, new: AttemptFolder) -> None:
        run, order = attempt.run, self._order
        hold(new, self._env, identify_command(order.line.command), process=os.getpid())
        if order.chain:
            start_attempt(new, order.chain)
        make_folders(new)
        queued = find_follow_up(new)
        if queued is not None:
            write_follow_up(new, queued)
        nodes, each = len(self.chosen) or order.line.nodes, order.line.ranks_per_node
        write_plan_file(run, read_plan_file(run)._replace(nodes=nodes, world_size=each and nodes * each))
        state = read_state(run)
        if state is not None and state.attempt == attempt.name and state.status == "unfinished":
            # the last that is written: what is there is the new one's, as for a chain
            replace_state(run, state._replace(attempt=new.name))
