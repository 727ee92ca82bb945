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


def end_left(
    marks: Mapping[str, str],
    tell: Callable[[str], None],
    whose: str = "the launcher",
    rest_s: float = 0.0,
    grace_s: float = _GRACE_S,
) -> None:
    """End every process of this user whose environment has these variables: by SIGTERM, then by SIGKILL. `whose`: who
    started them. `rest_s`: for those that end by themselves. `grace_s`: for those that were sent a signal."""
    left = _wait_for(marks, rest_s)
    if not left:
        return
    tell(f"{whose} left {len(left)} of its processes on this host; they are ended")
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in left:
            with suppress(OSError):
                os.kill(process, number)
        left = _wait_for(marks, grace_s)
        if not left:
            return
    tell(f"these processes of {whose} could not be ended: {' '.join(map(str, left))}")


def _wait_for(marks: Mapping[str, str], at_most_s: float) -> list[int]:
    """Those that are still there then."""
    end = time.monotonic() + at_most_s
    while (left := find_left(marks)) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def find_left(marks: Mapping[str, str]) -> list[int]:
    """The numbers of those processes, but for this one. What cannot be read is another user's."""
    wanted = {f"{name}={value}".encode(errors="surrogateescape") for name, value in marks.items()}
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
            if wanted <= set(file.read().split(b"\0")) and int(name) != os.getpid():
                found.append(int(name))
    return found
