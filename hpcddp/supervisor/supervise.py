"""A job from its start to its end: the run is taken, data copied to the nodes, the launcher started and watched."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import suppress
from functools import partial

from hpcddp.errors import HpcddpError
from hpcddp.ranks.frameworks import check_node_agents
from hpcddp.ranks.launchers import LAUNCHERS
from hpcddp.ranks.reach import reached_as
from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.runs.chain import list_job_runs
from hpcddp.runs.folder import AttemptFolder, cannot_write, job_of
from hpcddp.runs.hang import read_hang_limits
from hpcddp.runs.heartbeat import HEARTBEAT_VARIABLE, NO_RANK
from hpcddp.runs.jsonfile import read_object
from hpcddp.runs.lock import BY_HAND, release_run
from hpcddp.runs.start import FRESH
from hpcddp.runs.state import read_state
from hpcddp.runs.submitted import JobEnd, record_job_end
from hpcddp.schedulers.registry import find_allocation, find_scheduler
from hpcddp.signals import name_signal
from hpcddp.supervisor import follow
from hpcddp.supervisor.events import ERROR, UNFIT, UNKNOWN, Event
from hpcddp.supervisor.leftover import end_left
from hpcddp.supervisor.notice import Notices
from hpcddp.supervisor.order import find_run_folder, name_hosts, take_index
from hpcddp.supervisor.program import (
    WISHES,
    AttemptEnd,
    LauncherProcess,
    Output,
    SignalRelay,
    Signals,
    Teardown,
    allow_more_files,
    watch,
)
from hpcddp.supervisor.reports import Reports
from hpcddp.supervisor.start_end import LAUNCHED, begin, end_attempt, record_loss

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hpcddp.schedulers.registry import CurrentJob
    from hpcddp.supervisor.order import Order
    from hpcddp.supervisor.recovery import Recovery


#: The variable with the folder of the copied data: of all attempts, in the script; of this one, in the ranks.
STAGED = "HPCDDP_STAGED"
#: For what ends by itself: the ssh to each host with which an mpirun has started its daemon is there a moment longer.
_EXIT_S = 5.0
_SETTLE_S = 1.0  # in which every process has what a scheduler sends to all of them
#: The status of a job that has lost ranks where its launcher gives 0, as Open MPI 5 does: that of a killed process.
_LOST = 137


def supervise(order: Order, script: str, env: Mapping[str, str], encode: Callable[[str], bytes]) -> int:
    """Run the job; its exit status. `encode`: a message as it stands on stderr.

    The errors of `check_node_agents`, `take_index`, `find_job_of_script` and `begin`: then nothing was started.
    """
    read_hang_limits(env)  # RequestError, before anything is started
    check_node_agents(env, order.line.node_agent, order.line.nodes)
    allow_more_files()
    signals, output = Signals(), Output()
    try:
        return _run_job(order, script, env, signals, output, lambda text: output.print(encode(text)))
    finally:
        output.finish(signals)


def _run_job(
    order: Order, script: str, env: Mapping[str, str], signals: Signals, output: Output, emit: Callable[[str], None]
) -> int:
    order = take_index(order, env, emit)
    job = follow.find_job_of_script(order.scheduler, env)
    by_hand = env.get(LAUNCHED) == str(os.getpid())
    if by_hand:  # one of several, maybe
        job = job._replace(name=f"{job.name}{BY_HAND}{os.getpid()}")
    started = begin(order, find_run_folder(order, env), job, env, script, emit)
    if isinstance(started, int):
        return started
    attempts = Attempts(order, env, job, started.attempt, script, signals, output, emit, by_hand=by_hand)
    status: int | None = None
    by = why = ""
    try:
        ended = attempts.run(started.left)
        attempts.receive_signals("after the ranks had ended")  # the owner's wish ends a chain then, too
        by = ended.signal or ended.heard
        why = _name_cause(ended.cause, by)
        follow_up = attempts.follow_up if order.chain else None
        status = end_attempt(attempts.attempt, _judge(ended, attempts.attempt), follow_up, emit)
        return status
    finally:
        attempts.close(status, by, why)


def _name_cause(cause: Event | None, signal: str) -> str:
    """Why ranks have failed, for people. After a signal that need not end a job, an error may be the program's own,
    soon after it has saved: signal and error are both reported."""
    if cause is None or cause.kind == UNKNOWN or (signal and (signal in WISHES or cause.kind != ERROR)):
        return ""
    return str(cause)


def _judge(ended: AttemptEnd, attempt: AttemptFolder) -> AttemptEnd:
    """Replace the launcher's exit status by the first cause's where it hides it: srun gives that of its own signal
    where a rank failed, Open MPI 5 gives 0 where a host was lost."""
    if ended.cause is None or ended.signal or _is_finished(attempt, ended.cause):
        return ended
    return ended._replace(status=ended.cause.exit_status or ended.status or _LOST)


def _is_finished(attempt: AttemptFolder, cause: Event) -> bool:
    """Whether the ranks have written that the run is finished, and what happened to them after that does not matter.
    Of a script that opens runs itself nobody knows how many more it wants to open."""
    try:
        state = read_state(attempt.run)
        is_finished = state is not None and (state.status, state.attempt) == ("finished", attempt.name)
        return is_finished and not cause.is_loss_of_work and not list_job_runs(attempt)
    except HpcddpError:
        return False


class JobEnds(Record):
    """The job ends with its `last` attempt. `why`: why the ranks are not started again; "": nobody expects that."""

    last: AttemptEnd
    why: str = ""


class Attempts:
    """The attempts of one job, of which `attempt` is the current one. `script`: its file."""

    def __init__(
        self,
        order: Order,
        env: Mapping[str, str],
        job: CurrentJob,
        first: AttemptFolder,
        script: str,
        signals: Signals,
        output: Output,
        emit: Callable[[str], None],
        *,
        by_hand: bool,
    ) -> None:
        self.attempt = first
        self._order, self._job, self._by_hand = order, job, by_hand
        self._signals, self._output, self._emit = signals, output, emit
        # what a rank starts is another job, and this one may have been started in a rank of another
        job_variables = () if job.id else find_scheduler(order.scheduler).variables.job_id
        inherited = {LAUNCHED, HEARTBEAT_VARIABLE, *job_variables}
        self._env = {name: value for name, value in env.items() if name not in inherited}
        self._env |= {"HPCDDP_RUN_DIR": first.run.path, "HPCDDP_LOG_RANKS": "1", FRESH: order.fresh}
        if STAGED in env:
            self._env[STAGED] = os.path.join(env[STAGED], f"hpcddp-{first.name}")
        self._notices = Notices(order.notify, self._env, emit)
        self._notices.open(first)
        self._reports = Reports(order.stall_limit_s if order.max_restarts else 0, self._env)
        stop = partial(follow.stop_on_request, first.run.stop_request(job_of(first.name)))
        self._stop_requests = follow.RepeatedQuestion(stop, follow.POLL_S)
        self._stack_requests = follow.StackRequests(first, self._reports)
        walltime_s = order.walltime_s or follow.find_walltime(job.scheduler, script)
        end = follow.find_end(job, env, walltime_s, by_hand=by_hand)
        is_fixed = by_hand and end.source == follow.BY_SCRIPT
        self._end = follow.MovingEnd(job._replace(id="") if is_fixed else job, end, env)
        self.follow_up = follow.FollowUp(job, end, env, emit)
        self._recovery: Recovery | None = None
        if order.max_restarts:
            from hpcddp.supervisor.recovery import Recovery  # most jobs start without it

            self._recovery = Recovery(order, job, self._env, emit)

    def run(self, left: int) -> AttemptEnd:
        if self._end.end.at is not None:
            self._emit(f"the job ends at {self._end.end}")
        self._record_end()
        if left:
            self.follow_up.queue(self.attempt, self._order.submit_options)
        if find_scheduler(self._order.scheduler).commands.remote_shell:
            from hpcddp.ranks.remote_shell import replace_ssh

            folder = self.attempt.path
            self._env |= replace_ssh(self._order.scheduler, self._order.launcher, folder, self._env, self._emit)
        if self._order.preflight:
            ended = self._check_nodes()
            if ended.status or ended.signal:
                return ended
        while True:
            ended = self._run_ranks()
            following = self._find_next(ended)
            if isinstance(following, JobEnds):
                if following.why:
                    self._emit(f"the ranks are not started again: {following.why}")
                return following.last
            self.attempt = following
            self._stack_requests = follow.StackRequests(following, self._reports)
            self._record_end()
            self._notices.restart(following, str(ended.cause))

    def close(self, status: int | None, by: str, why: str) -> None:
        """The job ends with this attempt: its run is nobody's any more."""
        attempt = self.attempt
        self._reports.close()
        if not self._order.scratch:  # before anybody else may see the end, and send a notice of it
            self._notices.end(attempt, status, by, why)
            self._notices.finish()
        release_run(attempt.run, attempt.name, status, by, why)
        if self._order.scratch:
            shutil.rmtree(attempt.run.path, ignore_errors=True)
            with suppress(OSError):  # it has other runs
                os.rmdir(os.path.dirname(attempt.run.path))

    def _make_environment(self) -> dict[str, str]:
        at = self._end.end.at
        deadline = "" if at is None else str(at)
        return {**self._env, "HPCDDP_ATTEMPT": self.attempt.name, "HPCDDP_DEADLINE": deadline}

    def _run_ranks(self) -> AttemptEnd:
        """Copy the data, if there are any to copy, and start the ranks; nothing is started once a signal has come."""
        order, recovery, env = self._order, self._recovery, self._make_environment()
        stage, words = list(order.line.stage), list(order.line.words)
        if recovery is not None and recovery.chosen:
            stage = self._name_hosts(stage, recovery.chosen, "hosts-stage")
            words = self._name_hosts(words, recovery.chosen, "hosts")
            env |= find_scheduler(order.scheduler).overlap
            if "MASTER_ADDR" in env:
                env["MASTER_ADDR"] = reached_as(recovery.chosen[0], env)  # the script's may be left out
        self._reports.open(self.attempt)
        ended = self._launch(stage, env) if stage else AttemptEnd(0)
        if ended.status and not ended.signal:
            self._emit(f"the data could not be copied to the nodes (status {ended.status}); no rank was started")
        elif not ended.signal:
            ended = self._launch(words, env, self._watch_ranks(env))
        return ended

    def _watch_ranks(self, env: Mapping[str, str]) -> tuple[SignalRelay, Teardown]:
        job, row = self._job, LAUNCHERS.get(self._order.launcher)
        by_scheduler = row is not None and row.of_scheduler and job.id != ""
        ends = (lambda: follow.is_ending(job, self._env)) if by_scheduler else None
        by_hand, settle_s = self._by_hand or not job.id, _SETTLE_S if job.id else 0.0
        relay = SignalRelay(self._reports, self._emit, settle_s, ends, self._warn_at, by_hand=by_hand)
        acts, judges = self._recovery is not None, not env.get("HPCDDP_INDEPENDENT")
        return relay, Teardown(self._reports, self._emit, acts=acts, judges=judges)

    def _launch(
        self, words: list[str], env: Mapping[str, str], of_ranks: tuple[SignalRelay, Teardown] | None = None
    ) -> AttemptEnd:
        """Start a program, unless a signal has come, and wait for its end and that of what it has left."""
        ended = self.receive_signals("before the ranks were started")
        if ended is not None:
            return ended
        # PBS signals the job's process group: the launcher hears that without hpcddp, too
        launcher = LauncherProcess(words, env, self.attempt.log, self._output, apart=self._by_hand or not self._job.id)
        ended = watch(launcher, self._signals, self._emit, self.follow_up.receive, self._poll, of_ranks)
        marks = {name: env[name] for name in ("HPCDDP_RUN_DIR", "HPCDDP_ATTEMPT")}
        end_left(marks, env, self._emit, rest_s=_EXIT_S if ended.cause is None else 0.0)
        launcher.finish_output()
        if ended.status and of_ranks:
            logs = os.path.dirname(self.attempt.log)
            self._emit(f"the launcher ended with status {ended.status}; the ranks' logs are in {logs}")
        return ended

    def _check_nodes(self) -> AttemptEnd:
        """Check the job's hosts, before ranks are started on them: those that fail are left out, or the job ends. A
        check that cannot be made says nothing about them."""
        order, emit, recovery = self._order, self._emit, self._recovery
        report = os.path.join(os.path.abspath(self.attempt.path), "check.json")
        words, names = list(order.line.words), recovery.names if recovery is not None else ()
        options = ["--report", report, "--gpus-per-node", str(order.line.gpus_per_node)]
        if len(names) > 1:  # spare ones as well
            words = self._name_hosts(words, names, "hosts-check")
            options += ["--hosts", ",".join(names)]
        options += ["--line", order.preflight] if order.preflight != "true" else []
        emit(f"the nodes are checked before the ranks are started; {report} has what was found")
        program = [sys.executable, "-m", "hpcddp", "check", *options, "--", *words]
        ended = self._launch(program, self._make_environment())
        if ended.signal or not ended.status:
            return ended
        found = read_object(report) if ended.status == 1 else None
        if found is None:
            emit(f"the check could not be made (status {ended.status}), and the ranks are started all the same")
            return AttemptEnd(0)
        failed = [check for check in found["checks"] if check["state"] == "failed"]
        unfit = {check["host"]: f"{check['name']}: {check['message']}" for check in reversed(failed)}  # "": the launch
        if recovery is not None and unfit and "" not in unfit and recovery.start_without(unfit):
            emit(f"the ranks are started on {', '.join(recovery.chosen)}")
            return AttemptEnd(0)
        host = failed[0]["host"]
        text = f"{host or 'the launch'} is unfit, {unfit[host]}"
        emit(f"no rank was started: {text}")
        return AttemptEnd(1, cause=Event(UNFIT, NO_RANK, host, text=text))

    def _find_next(self, ended: AttemptEnd) -> AttemptFolder | JobEnds:
        """The attempt that follows in the same job, which holds the run by then; or the end, and why."""
        recovery, cause, attempt = self._recovery, ended.cause, self.attempt
        if recovery is None or cause is None:
            return JobEnds(ended)
        if _is_finished(attempt, cause):
            return JobEnds(ended, f"their run had finished ({cause})")
        if ended.signal:
            return JobEnds(ended, f"{ended.signal} came, and they may have ended by it ({cause})")
        obstacle = recovery.prepare_restart(attempt, cause, self._end.end, self._reports.lost_hosts)
        # as where the scheduler ends the ranks first, and then the script
        late = self.receive_signals("after the ranks had ended: they are not started again")
        if not obstacle or (late is not None and cause.is_loss):
            record_loss(attempt, cause)
        if late is not None:  # its line is printed
            return JobEnds(ended._replace(signal=late.signal))
        if obstacle:
            return JobEnds(ended, obstacle)
        try:
            return recovery.begin_again(attempt)
        except HpcddpError as error:
            return JobEnds(ended, str(error))

    def _name_hosts(self, words: list[str], hosts: Sequence[str], file: str) -> list[str]:
        """The launcher's words for these hosts, which a file in the attempt's folder lists."""
        launcher, line = LAUNCHERS[self._order.launcher], self._order.line
        if not words or not launcher.hosts:  # an agent on the one node that there is
            return words
        path = os.path.abspath(os.path.join(self.attempt.path, file))
        changed, text = name_hosts(words, launcher, line, hosts, path)
        try:
            with open(path, "w") as listed:
                listed.write(text)
        except OSError as error:
            raise cannot_write(self.attempt.run, error) from error
        return changed

    def receive_signals(self, when: str) -> AttemptEnd | None:
        """The last signal that has come while no rank runs; each is printed. None: none has."""
        ended = None
        for number in self._signals.read():
            self.follow_up.receive(number)
            ended = AttemptEnd(128 + number, name_signal(number))
            self._emit(f"{ended.signal} came {when}")
        return ended

    def _poll(self) -> None:
        """Look for requests of people (stop, stacks), send notices of stalls, and pass on an end that has moved."""
        self._stop_requests.poll()
        while self._reports.stalls:
            self._notices.stall(self.attempt, self._reports.stalls.pop(0))
        self._stack_requests.poll()
        if self._end.poll() and self._end.end.at is not None:
            self._emit(f"the job ends at {self._end.end} now")
            self._reports.send_end(self._end.end.at)
            follow.ask_in_thread(self._record_end)  # a file system may hang

    def _warn_at(self) -> int | None:
        warns_s, at = self._order.signal_s, self._end.end.at
        return at - warns_s if warns_s and at is not None else None

    def _record_end(self) -> None:
        """Write the end down for people who look at the run from elsewhere; the job does not depend on it."""
        end, job = self._end.end, self._job
        allocation = find_allocation(self._env) if job.id else None
        nodes = len(allocation.hosts) if allocation is not None and allocation.hosts else self._order.line.nodes
        with suppress(OSError):
            record_job_end(self.attempt, JobEnd(job.scheduler, job.id, nodes, end.at, end.source, self._warn_at()))
