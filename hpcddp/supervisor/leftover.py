"""What an attempt's launcher, or a rank, left behind on this host is ended, so that no later job meets it."""

from __future__ import annotations

import os
import time
from contextlib import suppress

from hpcddp.record import TYPE_CHECKING

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Mapping
else:
    import _signal as signal

_GRACE_S = 10.0
#: Where the schedulers say which job a process belongs to. A job that a rank submits inherits the rank's environment,
#: but for that. Without Flux's, which runs in other schedulers' jobs: its ranks have one where the script has none.
JOB_IDS = ("SLURM_JOB_ID", "PBS_JOBID", "JOB_ID", "LSB_JOBID", "PJM_JOBID", "HPCDDP_JOB_ID")


def end_left(
    marks: Mapping[str, str],
    env: Mapping[str, str],
    tell: Callable[[str], None],
    whose: str = "the launcher",
    rest_s: float = 0.0,
    grace_s: float = _GRACE_S,
) -> None:
    """End every process of `find_left`: by SIGTERM, then by SIGKILL. `whose`: who started them. `rest_s`: for those
    that end by themselves. `grace_s`: for those that were sent a signal."""
    left = _wait_for(marks, env, rest_s)
    if not left:
        return
    tell(f"{whose} left {len(left)} of its processes on this host; they are ended")
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in left:
            with suppress(OSError):
                os.kill(process, number)
        left = _wait_for(marks, env, grace_s)
        if not left:
            return
    tell(f"these processes of {whose} could not be ended: {' '.join(map(str, left))}")


def _wait_for(marks: Mapping[str, str], env: Mapping[str, str], at_most_s: float) -> list[int]:
    """Those that are still there then."""
    end = time.monotonic() + at_most_s
    while (left := find_left(marks, env)) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def find_left(marks: Mapping[str, str], env: Mapping[str, str]) -> list[int]:
    """The numbers of the processes of this user whose environment has these variables, but for this one and those of
    another job than `env` is of. What cannot be read is another user's."""
    wanted = set(_lines(marks))
    own = set(job_lines(env))
    names = tuple(f"{name}=".encode() for name in JOB_IDS)
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
            there = set(file.read().split(b"\0"))
            if not wanted <= there or int(name) == os.getpid():
                continue
            if all(line in own for line in there if line.startswith(names)):
                found.append(int(name))
    return found


def job_lines(env: Mapping[str, str]) -> list[bytes]:
    """What says in an environment which job it is of."""
    return _lines({name: env[name] for name in JOB_IDS if name in env})


def _lines(variables: Mapping[str, str]) -> list[bytes]:
    return [f"{name}={value}".encode(errors="surrogateescape") for name, value in variables.items()]
