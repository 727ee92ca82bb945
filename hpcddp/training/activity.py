"""Markers that a rank sets for the supervisor while it uses checkpoint files or waits for other ranks.

The code that waits sets them: from outside, a call that waits looks like any other.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_file_uses = 0  # by threads of this process, at this moment
_waits = Counter[int]()  # for other ranks, by thread


@contextmanager
def at_files() -> Iterator[None]:
    """Mark that this process reads or writes a checkpoint in the body. Collectives do not belong there: ranks that wait
    for each other would have the longer limit, too."""
    global _file_uses
    with _lock:
        _file_uses += 1
    try:
        yield
    finally:
        with _lock:
            _file_uses -= 1


def is_at_files() -> bool:
    """Whether any thread is: the main thread may wait for one that writes beside the training."""
    return _file_uses > 0


@contextmanager
def waiting() -> Iterator[None]:
    """Mark that this thread waits for other ranks in the body."""
    thread = threading.get_ident()
    _waits[thread] += 1
    try:
        yield
    finally:
        _waits[thread] -= 1


def waits_for_ranks(thread: int) -> bool:
    """Whether this thread waits for other ranks by hpcddp's own means."""
    return _waits.get(thread, 0) > 0
