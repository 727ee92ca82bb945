"""What an attempt's launcher left behind on this host is ended, so that no later job meets it."""

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


def end_left(marks: Mapping[str, str], tell: Callable[[str], None]) -> None:
    """End every process of this user whose environment has these variables: by SIGTERM, then by SIGKILL."""
    left = find_left(marks)
    if not left:
        return
    tell(f"the launcher left {len(left)} of its processes on this host; they are ended")
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in left:
            with suppress(OSError):
                os.kill(process, number)
        end = time.monotonic() + _GRACE_S
        while (left := find_left(marks)) and time.monotonic() < end:
            time.sleep(0.05)
        if not left:
            return
    tell(f"these processes of the launcher could not be ended: {' '.join(map(str, left))}")


def find_left(marks: Mapping[str, str]) -> list[int]:
    """The numbers of those processes, but for this one. What cannot be read is another user's."""
    wanted = {f"{name}={value}".encode(errors="surrogateescape") for name, value in marks.items()}
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
            if wanted <= set(file.read().split(b"\0")) and int(name) != os.getpid():
                found.append(int(name))
    return found
