"""How an mpirun starts processes on the other hosts of a job where ssh does not reach them: as the scheduler does.

The scheduler's program cannot take the place of ssh as it is: a small script of its row stands between.
"""

from __future__ import annotations

import os
import shlex
import shutil

from hpcddp.ranks.launchers import LAUNCHERS
from hpcddp.record import TYPE_CHECKING
from hpcddp.schedulers.registry import find_scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hpcddp.runs.folder import AttemptFolder

_PATIENCE_S = 10.0


def reach_hosts(
    scheduler: str, launcher: str, attempt: AttemptFolder, env: Mapping[str, str], tell: Callable[[str], None]
) -> dict[str, str]:
    """Variables by which this launcher reaches the other hosts of the job. Empty where it needs none, or somebody has
    chosen before, or nothing can be done, which is told."""
    told = find_scheduler(scheduler).commands.remote_shell
    shell = LAUNCHERS[launcher].remote_shell if launcher in LAUNCHERS else ()
    if told is None or not shell or any(env.get(name) for name, _ in shell):
        return {}
    host = _find_unreached(env)
    if host is None:
        return {}
    program = told.program
    path = shutil.which(program, path=f"{env.get('PATH', '')}:{env.get(told.home_variable) or told.home}/bin")
    if path is None:
        tell(
            f"warning: ssh does not reach {host}, and {program} is not on PATH: {launcher} starts processes on other"
            " hosts by ssh, unless it was built for this scheduler"
        )
        tell(f"hint: give yourself ssh between the nodes (ssh {host} true), or add {program} to PATH")
        return {}
    between = os.path.join(attempt.path, "remote-shell")
    if len(between.split()) > 1:
        tell(f"warning: ssh does not reach {host}, and a launcher can call nothing in a folder with a blank: {between}")
        return {}
    try:
        file = os.open(between, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o700)
        with os.fdopen(file, "w") as script:
            script.write(told.script.format(program=shlex.quote(path)))
    except OSError as error:
        tell(f"warning: ssh does not reach {host}, and {between} cannot be written: {error.strerror}")
        return {}
    tell(f"ssh does not reach {host}: {launcher} is given {program} in its place")
    return {name: value.replace("{}", between) for name, value in shell}


def _find_unreached(env: Mapping[str, str]) -> str | None:
    """Another host of the job, if ssh does not reach it. One stands for all."""
    from hpcddp.schedulers.run import run_side_by_side
    from hpcddp.supervisor.hosts import SSH, is_own, list_hosts

    host = next((name for name in list_hosts(env) if not is_own(name)), None)
    if host is None:
        return None
    ssh = [word.replace("{host}", host) for word in SSH]
    return host if run_side_by_side({host: [*ssh, "true"]}, env, {host: _PATIENCE_S}) else None
