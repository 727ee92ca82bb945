"""The hosts of a job: which of them start a process, which are well, and which the ranks are started on next."""

from __future__ import annotations

import os
import shlex
import shutil
import time

from hpcddp.errors import HpcddpError
from hpcddp.ranks.allocation import find_allocation
from hpcddp.ranks.launchers import LAUNCHERS
from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.runs.folder import MANIFEST, list_checkpoints
from hpcddp.schedulers.allocation import same_host
from hpcddp.schedulers.registry import find_scheduler
from hpcddp.schedulers.row import Answer
from hpcddp.schedulers.run import ask_about, run_program, run_side_by_side
from hpcddp.supervisor.leftover import kill_left
from hpcddp.units import format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from hpcddp.runs.folder import AttemptFolder
    from hpcddp.schedulers.registry import CurrentJob
    from hpcddp.supervisor.order import Order

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "{host}")
_PROBE_S, _SUSPECT_S = 30.0, 5.0  # a host that has been silent before has less
_PAUSE_S = 2.0  # between two looks at a host that does not answer
_MOST_BLAMED = 2
_TRIES = 5
#: For a shell, with the number of GPUs: all are there, and no row or page of their memory waits for a reset that only
#: the site's people can do. A driver that says nothing of them, or no driver, is no fault.
_GPU_CHECK = """\
command -v nvidia-smi >/dev/null || exit 0
[ "$(nvidia-smi -L | grep -c '^GPU ')" -ge "$1" ] || exit 1
! nvidia-smi -q -d ROW_REMAPPER,PAGE_RETIREMENT | grep -Eq '(Pending|Remapping Failure Occurred|Blacklist) *: Yes'"""
#: For a shell: no GPU has counted an uncorrectable error since its driver was started, which may be long ago.
_ECC_CHECK = """\
command -v nvidia-smi >/dev/null || exit 0
! nvidia-smi --query-gpu=ecc.errors.uncorrected.volatile.total --format=csv,noheader | grep -q '^[1-9]'"""
# A parallel file system may be mounted again to be read alone, after an error.
_WRITE = 'file=$1/.written-by-$(uname -n).$$; touch "$file" && rm -f "$file"'


class Check(Record):
    """What a host has to run without an error, or it is left out: `why`. One that is built in and fails on every host
    is wrong itself. `is_doubt`: the host is left out only where it works out without it."""

    words: tuple[str, ...]
    why: str
    is_built_in: bool = True
    is_doubt: bool = False


def list_checks(order: Order) -> list[Check]:
    """The checks of the job, in order; those of the attempt come first."""
    checks = list[Check]()
    gpus = order.line.gpus_per_node
    if gpus:
        missing = f"it does not have {format_count(gpus, 'GPU')}, or one of them needs a reset"
        checks.append(Check(("sh", "-c", _GPU_CHECK, "sh", str(gpus)), missing))
        counted = "one of its GPUs has counted uncorrectable errors of its memory"
        checks.append(Check(("sh", "-c", _ECC_CHECK), counted, is_doubt=True))
    if order.health_check:
        checks.append(Check(("sh", "-c", order.health_check), "its health check failed", is_built_in=False))
    return checks


def clear_check(attempt: AttemptFolder, env: Mapping[str, str]) -> Check:
    """No rank of this attempt is left on the host, as one whose agent has lost its connection may be."""
    marks = {"HPCDDP_RUN_DIR": attempt.run.path, "HPCDDP_ATTEMPT": attempt.name}
    return Check(kill_left(marks, env), "ranks of the last start cannot be ended there")


def folder_checks(attempt: AttemptFolder) -> list[Check]:
    """The run's own folder, which may have another name than the job asked for, is there and can be written, and its
    newest checkpoint can be read."""
    path = os.path.abspath(attempt.run.path)
    checks = [
        Check(("test", "-d", path), "it does not see the run folder"),
        Check(("sh", "-c", _WRITE, "sh", path), "it cannot write to the run folder"),
    ]
    saved = list_checkpoints(os.path.abspath(attempt.run.checkpoints))
    manifest = os.path.join(saved[-1], MANIFEST) if saved else ""
    if os.path.isfile(manifest):
        checks.append(Check(("head", "-c", "1", manifest), "it cannot read the newest checkpoint"))
    return checks


def list_hosts(env: Mapping[str, str]) -> tuple[str, ...]:
    """The hosts of the job, as its scheduler names them; empty where none are known."""
    allocation = find_allocation(env)
    return tuple(name for name, _ in (allocation.hosts or ())) if allocation is not None else ()


class Hosts:
    """The hosts of one job; `names` in its order, with the host of the script first. None are known on one machine."""

    def __init__(
        self, job: CurrentJob, env: Mapping[str, str], checks: list[Check], tell: Callable[[str], None]
    ) -> None:
        self._job, self._env, self._checks, self._tell = job, env, checks, tell
        self._commands = find_scheduler(job.scheduler).commands
        self.names = list_hosts(env) if job.id else ()
        self._left_out: set[str] = set()
        self._blamed: dict[str, int] = {}
        self._starter = self._find_starter()

    def blame(self, host: str) -> None:
        """An attempt failed there. Its name may be a shorter or a longer one than the scheduler's."""
        for name in self.names:
            if same_host(name, host):
                self._blamed[name] = self._blamed.get(name, 0) + 1

    def find_usable(self, attempt: AttemptFolder, suspects: set[str]) -> tuple[str, ...]:
        """The hosts on which ranks may be started, none of this `attempt` being left there. Who does not answer twice,
        or is not well, is left out for good; the silence of `suspects` counts as one of the two. The scheduler is told
        of a host that is gone, so that it does not end the job."""
        there = [name for name in self.names if name not in self._left_out]
        silent = self._find_silent(there, suspects)
        for name in silent:
            self._leave_out(name, "it does not answer")
        self._drop(silent)
        checks = [clear_check(attempt, self._env), *folder_checks(attempt), *self._checks]
        for check in checks if self._starter or len(self.names) < 2 else ():
            there = [name for name in there if name not in self._left_out]
            failed = self._ask(there, check.words)
            if check.is_doubt:
                self._doubt(failed, check.why)
                continue
            if failed and check.is_built_in and len(failed) == len(there):
                self._tell(f"a check fails on each host ({check.why}), and may not work here")
                continue
            for name in failed:
                self._leave_out(name, check.why)
        return tuple(name for name in there if name not in self._left_out)

    def check_here(self, attempt: AttemptFolder) -> str:
        """Why no ranks may be started on this machine, the only host that there is; "": it is well. One of our own
        checks that fails here fails everywhere, and is printed and not believed."""
        for check in (*folder_checks(attempt), *self._checks):
            if not self._ask([os.uname().nodename], check.words):
                continue
            if check.is_doubt:
                continue
            if not check.is_built_in:
                return check.why
            self._tell(f"a check fails here ({check.why}), and may not work on this machine")
        return ""

    def choose(self, usable: tuple[str, ...], fits: tuple[int, ...]) -> tuple[str, ...]:
        """Choose as many of the usable hosts as the request can have, without those that were blamed twice if it works
        out without them. Empty: it does not work out."""
        first = self.names[0]  # the script is there, and the address of the rendezvous
        good = [name for name in usable if name == first or self._blamed.get(name, 0) < _MOST_BLAMED]
        for candidates in (good, list(usable)):
            count = max((number for number in fits if number <= len(candidates)), default=0)
            if count:
                return tuple(candidates[:count])
        return ()

    def _find_silent(self, names: list[str], suspects: set[str]) -> list[str]:
        """The hosts that are gone, as far as that can be found out."""
        suspected = [name for name in names if any(same_host(name, one) for one in suspects) and not is_this_host(name)]
        others = [name for name in names if not is_this_host(name)]
        if not others:
            return []
        if not self._starter:
            self._tell("no program is on PATH by which a host can be asked whether it answers (ssh)")
            return suspected
        silent = self._ask(others, ("true",), suspected)
        doubted = [name for name in silent if name not in suspected]
        if doubted:
            time.sleep(_PAUSE_S)
            again = self._ask(doubted, ("true",))
            silent = [name for name in silent if name in suspected or name in again]
        if len(silent) == len(others) and len(suspected) < len(others):  # more likely than that all are gone at once
            self._tell(f"no host answers {self._starter[0]}, which may not work here")
            return suspected
        return silent

    def _find_starter(self) -> tuple[str, ...]:
        for words in (self._commands.starter, SSH):
            if words and shutil.which(words[0], path=self._env.get("PATH")):
                return words
        return ()

    def _ask(self, names: Iterable[str], words: tuple[str, ...], suspected: Iterable[str] = ()) -> list[str]:
        """The hosts on which this command does not end well, all asked side by side."""
        fill = self._fill
        sent = (shlex.join(words),) if self._starter == SSH else words  # it gives a shell one line
        commands = {name: [*words] if is_this_host(name) else [*fill(self._starter, name), *sent] for name in names}
        patience = {name: _SUSPECT_S if name in suspected else _PROBE_S for name in commands}
        return run_side_by_side(commands, self._env, patience)

    def _fill(self, words: tuple[str, ...], name: str) -> list[str]:
        left = ",".join(host for host in self.names if host not in self._left_out)
        return [w.replace("{job}", self._job.id).replace("{host}", name).replace("{kept}", left) for w in words]

    def _doubt(self, names: list[str], why: str) -> None:
        """Count these as blamed already, but for the first host, which is always one of those chosen."""
        for name in names:
            if name != self.names[0] and self._blamed.get(name, 0) < _MOST_BLAMED:
                self._blamed[name] = _MOST_BLAMED
                self._tell(f"{name} is avoided where others are enough: {why}")

    def _leave_out(self, name: str, why: str) -> None:
        self._left_out.add(name)
        self._tell(f"{name} is left out: {why}")

    def _drop(self, gone: list[str]) -> None:
        """Within minutes the scheduler would end a job that has lost a host: it gives that host back itself."""
        words = self._commands.drop
        if not words or not gone or not shutil.which(words[0], path=self._env.get("PATH")):
            return
        each = gone if "{host}" in " ".join(words) else gone[:1]
        answer = ask_about(self._job.scheduler, self._job.id, self._env, _PROBE_S) or Answer(1, "", "")
        for name in each:
            called = self._commands.parse_names(answer, name)
            command = [one for word in words for one in (called if word == "{host}" else self._fill((word,), name))]
            why = self._insist(command)
            if why:
                self._tell(f"the scheduler did not take {name} out of the job, and may end it: {why}")
            else:
                gone_now = format_count(len(gone), "host") if each != gone else name
                self._tell(f"{gone_now} given back to the scheduler ({command[0]}), so that the job goes on")

    def _insist(self, command: list[str]) -> str:
        """Why the scheduler does not do it; empty: it does. Slurm answers now and then that it is not ready."""
        why = ""
        for left in reversed(range(_TRIES)):
            try:
                answer = run_program(command, self._env, folder=self._env.get("HPCDDP_RUN_DIR"), patience_s=_PROBE_S)
                why = answer.stderr.strip() if answer.status else ""
            except HpcddpError as error:
                return error.message
            if not why:
                break
            if left:
                time.sleep(_PAUSE_S)
        return why


def is_this_host(name: str) -> bool:
    """Whether this is the host of the job script."""
    return same_host(name, os.uname().nodename)


# How an mpirun starts processes on the other hosts of a job where ssh does not reach them: as the scheduler does.


_PATIENCE_S = 10.0


def reach_hosts(
    scheduler: str, launcher: str, attempt: AttemptFolder, env: Mapping[str, str], tell: Callable[[str], None]
) -> dict[str, str]:
    """Variables by which this launcher reaches the other hosts of the job. Empty where it needs none, or somebody has
    chosen before, or nothing can be done, which is printed."""
    row = find_scheduler(scheduler).commands.remote_shell
    shell = LAUNCHERS[launcher].remote_shell if launcher in LAUNCHERS else ()
    if row is None or not shell or any(env.get(name) for name, _ in shell):
        return {}
    host = _find_unreached(env)
    if host is None:
        return {}
    program = row.program
    path = shutil.which(program, path=f"{env.get('PATH', '')}:{env.get(row.home_variable) or row.home}/bin")
    if path is None:
        tell(
            f"warning: ssh does not reach {host}, and {program} is not on PATH: {launcher} starts processes on other"
            " hosts by ssh, unless it was built for this scheduler"
        )
        tell(f"hint: give yourself ssh between the nodes (ssh {host} true), or add {program} to PATH")
        return {}
    wrapper = os.path.join(attempt.path, "remote-shell")
    if len(wrapper.split()) > 1:
        tell(f"warning: ssh does not reach {host}, and a launcher can call nothing in a folder with a blank: {wrapper}")
        return {}
    try:
        file = os.open(wrapper, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o700)
        with os.fdopen(file, "w") as script:
            script.write(row.script.format(program=shlex.quote(path)))
    except OSError as error:
        tell(f"warning: ssh does not reach {host}, and {wrapper} cannot be written: {error.strerror}")
        return {}
    tell(f"ssh does not reach {host}: {launcher} is given {program} in its place")
    return {name: value.replace("{}", wrapper) for name, value in shell}


def _find_unreached(env: Mapping[str, str]) -> str | None:
    """Another host of the job, if ssh does not reach it. One stands for all."""
    from hpcddp.schedulers.run import run_side_by_side

    host = next((name for name in list_hosts(env) if not is_this_host(name)), None)
    if host is None:
        return None
    ssh = [word.replace("{host}", host) for word in SSH]
    return host if run_side_by_side({host: [*ssh, "true"]}, env, {host: _PATIENCE_S}) else None
