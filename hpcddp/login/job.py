"""`hpcddp.Job`: the verbs of the login node for notebooks and scripts. Imports no torch.

An edge: the process's environment is read here and passed on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpcddp.errors import LaunchError, RequestError
from hpcddp.login.judge import WAITING, RunStatus, find_status
from hpcddp.uncaught import two_lines

if TYPE_CHECKING:
    from hpcddp.script.site import Site
    from hpcddp.script.spec import JobSpec

_CREATED_BY = "hpcddp.Job(…).submit()"


class Job:
    """One request, and what becomes of it: the keys of a job file (docs/job-file.md) as arguments.

        job = hpcddp.Job("python train.py", site="abci3", account="gaa50000", nodes=4, walltime="2h")
        job.submit()
        job.wait()

    `command` is a list of words, or one text that is split as a shell splits it. `file` is a job file, over which the
    arguments win. `run` names a run that is there already, by its name, folder or job id, to ask about or to cancel.
    Values may be text, numbers, booleans, lists and mappings, as YAML has them; None counts as not given. Errors are
    hpcddp's own (`hpcddp.errors`), in two lines.
    """

    def __init__(
        self,
        command: str | Sequence[str] | None = None,
        *,
        file: str | os.PathLike[str] | None = None,
        run: str | os.PathLike[str] | int | None = None,
        **keys: object,
    ) -> None:
        with two_lines():
            name = None if run is None else str(run) if isinstance(run, int) else os.fspath(run)
            if run is not None and (command is not None or file is not None or keys):
                raise RequestError(f"Job(run={name!r}) takes no other argument", "Job(run=…).status()")
            if run is None and command is None and file is None and "command" not in keys:
                raise RequestError("Job() has no command", 'hpcddp.Job("python train.py", nodes=4)')
        self._run = name
        self._file = None if file is None else os.fspath(file)
        given = {"command": command, **keys} if command is not None else dict(keys)
        self._keys = {key: value for key, value in given.items() if value is not None}

    def render(self) -> str:
        """The job script. A sweep that is several scripts is a RequestError, as for `hpcddp render`."""
        from hpcddp.login.planning import stamp_of_day, this_process
        from hpcddp.script.plan import plan_job
        from hpcddp.script.render import render_script

        with two_lines():
            spec, site, _ = self._read_request()
            return render_script(plan_job(spec, site, this_process(_CREATED_BY, stamp_of_day(os.environ))))

    def submit(self) -> str:
        """Queue the job; its id, or those of a sweep that is several jobs, one per line. SchedulerError if it is
        refused."""
        from hpcddp.login.planning import this_process
        from hpcddp.login.submit import check_parts, plan_parts, submit_parts

        with two_lines():
            spec, site, _ = self._read_request()
            parts = plan_parts(spec, site, os.environ, this_process(_CREATED_BY))
            check_parts(parts, os.environ)
            queued = submit_parts(parts, os.environ)
        self._run = os.path.abspath((parts.sweep or parts.parts[0].run).path)
        return "\n".join(one.job for one in queued)

    def status(self) -> RunStatus:
        """What became of the run, by its folder and the scheduler; of a sweep its own row."""
        from hpcddp.login.find_run import find_run

        with two_lines():
            return find_status([find_run(self._name())], os.environ).runs[0]

    def wait(self, timeout_s: float | None = None, every_s: float = 30.0) -> RunStatus:
        """Wait until nothing of the run waits or runs any more, or it is held, and return its status. TimeoutError
        after `timeout_s` seconds. The scheduler is asked every `every_s`."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while (status := self.status()).lives and status.state != "held":  # only a person can go on with that
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(f"{status.path} is {status.state} after {timeout_s} s")
            time.sleep(every_s if left is None else min(every_s, left))
        return status

    def logs(self, rank: int = 0) -> str:
        """What this rank has printed in the newest attempt, rank 0 with the launcher; "" before it has started.
        RequestError for a sweep, and for a rank that an ended attempt did not have."""
        from hpcddp.login.find_run import find_single_run
        from hpcddp.runs.logs import list_sources, order_attempts, read_log_lines

        with two_lines():
            run = find_single_run(self._name(), "logs", "hpcddp.Job(run='{}').logs()")
            attempts = order_attempts(run)
            sources = list_sources(attempts[-1], frozenset({rank})) if attempts else []
            status = None if sources or not attempts else find_status([run], os.environ).runs[0]
            if status is not None and (not status.lives or status.state in WAITING):
                raise RequestError(f"there is no log of rank {rank} in attempt {attempts[-1].name}", "logs(rank=0)")
        lines = [line for source in sources for line in read_log_lines(source.path)[0]]
        return "".join(f"{line.decode(errors='replace')}\n" for line in lines)

    def cancel(self, *, now: bool = False) -> None:
        """End all jobs of the run: what runs saves and stops; `now`: it ends as its scheduler's own command ends it."""
        from hpcddp.login.cancel import cancel_runs
        from hpcddp.login.find_run import find_run

        with two_lines():
            cancel_runs([find_run(self._name())], os.environ, now=now)

    def _name(self) -> str:
        if self._run is None:
            raise LaunchError("this job was not submitted", "job.submit(), or hpcddp.Job(run=NAME) for one that was")
        return self._run

    def _read_request(self) -> tuple[JobSpec, Site, tuple[str, ...]]:
        from hpcddp.login.planning import choose_site, read_request

        given, site = self._read_keys(), self._keys.get("site")
        choice = choose_site(given, None if site is None else str(site), self._file, os.environ)
        return read_request(given, choice, os.environ)

    def _read_keys(self) -> Mapping[str, tuple[object, str]]:
        from hpcddp.script.site_file import load_yaml

        if self._run is not None and not self._keys and self._file is None:
            raise RequestError(f"Job(run={self._run!r}) is there already", "Job(command, …) for a new one")
        given: dict[str, tuple[object, str]] = {}
        if self._file is not None:
            given = {key: (value, f"{key} in {self._file}") for key, value in load_yaml(self._file)[0].items()}
        for key, value in self._keys.items():
            given[key] = (_as_yaml(value, f"Job({key}=…)"), f"Job({key}=…)")
        return given


def _as_yaml(value: Any, where: str) -> Any:
    """The value as a job file's reader gets it: text, and lists and mappings of text. Arrays are lists."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return {str(key): _as_yaml(one, where) for key, one in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [_as_yaml(one, where) for one in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, (str, int, float)):
        return str(value)
    if hasattr(value, "tolist"):  # numpy's and torch's
        return _as_yaml(value.tolist(), where)
    raise RequestError(
        f"{where} has a value of type {type(value).__name__}", "text, numbers, booleans, lists and mappings of them"
    )
