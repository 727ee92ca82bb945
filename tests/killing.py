"""A process that gets SIGKILL at a file operation of its own."""

from __future__ import annotations

import itertools
import os
import signal
import sys

_OPERATIONS = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "fsync"}


def kill_at_operation(nth: int) -> None:
    """From now on count this process's file operations; before the nth (from 0) it gets SIGKILL."""
    operations = itertools.count()
    flush = os.fsync

    def before(event: str, _arguments: object) -> None:
        if event in _OPERATIONS and next(operations) == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(descriptor: int) -> None:
        before("fsync", descriptor)
        flush(descriptor)

    sys.addaudithook(before)
    os.fsync = counted  # it has no audit event
