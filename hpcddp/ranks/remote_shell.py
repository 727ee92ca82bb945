"""The scheduler's own program in the place of ssh, for launchers that start processes on the job's other hosts."""

from __future__ import annotations

import os
import shlex
import shutil

from hpcddp.ranks.launchers import LAUNCHERS
from hpcddp.record import TYPE_CHECKING
from hpcddp.schedulers.allocation import is_this_host
from hpcddp.schedulers.registry import find_scheduler, list_hosts
from hpcddp.schedulers.run import run_and_find_failures

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "{host}")
_SSH_S = 10.0  # for the first look whether ssh reaches the hosts


def replace_ssh(
    scheduler: str, launcher: str, folder: str, env: Mapping[str, str], emit: Callable[[str], None]
) -> dict[str, str]:
    """Write the program that this launcher calls instead of ssh to this folder; the variables that say so to it. Empty
    where ssh does it, or somebody has chosen before, or nothing can be done, which is printed."""
    row = find_scheduler(scheduler).commands.remote_shell
    variables = LAUNCHERS[launcher].remote_shell if launcher in LAUNCHERS else ()
    if row is None or not variables or any(env.get(name) for name, _ in variables):
        return {}
    host = next((name for name in list_hosts(env) if not is_this_host(name)), None)  # it stands for all
    ssh = [word.replace("{host}", host or "") for word in SSH]
    if host is None or not run_and_find_failures({host: [*ssh, "true"]}, env, {host: _SSH_S}):
        return {}
    program, wrapper = row.program, os.path.join(folder, "remote-shell")
    path = shutil.which(program, path=f"{env.get('PATH', '')}:{env.get(row.home_variable) or row.home}/bin")
    if path is None or len(wrapper.split()) > 1:  # a launcher reads words
        why = f"{program} is not on PATH" if path is None else f"{folder} has a blank in its name"
        emit(f"warning: ssh does not reach {host}, and {why}: {launcher} starts processes there by ssh")
        emit(f"hint: give yourself ssh between the nodes (ssh {host} true), or add {program} to PATH")
        return {}
    file = os.open(wrapper, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o700)
    with os.fdopen(file, "w") as script:
        script.write(row.script.format(program=shlex.quote(path)))
    emit(f"ssh does not reach {host}: {launcher} is given {program} in its place")
    return {name: value.replace("{}", wrapper) for name, value in variables}
