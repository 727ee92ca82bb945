"""Ends the processes that a launcher or a rank left behind on this host, so that no later job meets them."""

from __future__ import annotations

import os
import time
from contextlib import suppress

from hpcddp.processes import list_processes, read_environ, read_stat
from hpcddp.record import TYPE_CHECKING
from hpcddp.schedulers.registry import job_variables

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Mapping
else:
    import _signal as signal

# SIGKILL to every process that has the marks $1 and $2, and none of the variables $3 but with the values $4, until
# there is none. What it runs itself has no mark.
_KILL = """\
find_left() {
for file in $(grep -slzxF -e "$2" /dev/null $(grep -slzxF -e "$1" /dev/null /proc/[0-9]*/environ)); do
tr '\\0' '\\n' <"$file" 2>/dev/null | grep -aE "^($3)=" | grep -qavxF -e "$4" || echo "$file"
done
}
tries=0
while left=$(find_left "$@"); [ "$left" ]; do
[ "$tries" -lt 50 ] || exit 1
tries=$((tries + 1))
for file in $left; do file=${file%/environ}; kill -KILL "${file#/proc/}" 2>/dev/null; done
sleep 0.2
done"""


def end_left(
    marks: Mapping[str, str],
    env: Mapping[str, str],
    emit: Callable[[str], None],
    whose: str = "the launcher",
    rest_s: float = 0.0,
) -> None:
    """Kill every process of `find_left` that has not ended by itself in `rest_s`. `whose`: who started them."""
    end = time.monotonic() + rest_s
    while (left := find_left(marks, env)) and time.monotonic() < end:
        time.sleep(0.05)
    if left:
        emit(f"{whose} left {len(left)} of its processes on this host; they are killed")
    for process in left:
        with suppress(OSError):
            os.kill(process, signal.SIGKILL)


def find_left(marks: Mapping[str, str], env: Mapping[str, str]) -> list[int]:
    """The numbers of the processes of this user whose environment has these variables, but for this one and those of
    another job than `env` is of. What cannot be read is another user's."""
    wanted = set(_lines(marks))
    names, lines = _describe_job(env)
    begins = tuple(f"{name}=".encode() for name in names)
    found = []
    for process in list_processes():
        there = read_environ(process)
        if not wanted <= there or process == os.getpid():
            continue
        if all(line in lines for line in there if line.startswith(begins)):
            found.append(process)
    return found


def find_marked(process: int, marks: tuple[str, ...]) -> list[int]:
    """The processes below this one that have one of these variables, without those that they have started."""
    children: dict[int, list[int]] = {}
    for one in list_processes():
        if (stat := read_stat(one)) is not None:
            children.setdefault(stat.parent, []).append(one)
    begins, found, below = tuple(f"{mark}=".encode() for mark in marks), list[int](), children.get(process, [])
    while below:
        one = below.pop()
        if any(line.startswith(begins) for line in read_environ(one)):
            found.append(one)
        else:
            below += children.get(one, ())
    return found


def kill_left(marks: Mapping[str, str], env: Mapping[str, str]) -> tuple[str, ...]:
    """The command that kills them, also on another host and without Python. `marks`: two. It fails where some are
    still there after ten seconds."""
    first, second = (f"{name}={value}" for name, value in marks.items())
    names, lines = _describe_job(env)
    text = b"\n".join(lines).decode(errors="surrogateescape")
    return "sh", "-c", _KILL, "sh", first, second, "|".join(names), text


def _describe_job(env: Mapping[str, str]) -> tuple[list[str], list[bytes]]:
    names = job_variables(env)
    return names, _lines({name: env[name] for name in names if name in env})


def _lines(variables: Mapping[str, str]) -> list[bytes]:
    return [f"{name}={value}".encode(errors="surrogateescape") for name, value in variables.items()]
