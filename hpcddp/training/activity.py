"""Markers that a rank sets for the supervisor while it uses checkpoint files or waits for other ranks.

The code that waits sets them: from outside, a call that waits looks like any other.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

_file_uses, _waits = Counter[int](), Counter[int]()  # by thread, at this moment


@contextmanager
def _mark(marks: Counter[int]) -> Iterator[None]:
    thread = threading.get_ident()
    marks[thread] += 1
    try:
        yield
    finally:
        marks[thread] -= 1


#: Mark that this process reads or writes a checkpoint in the body. Collectives do not belong there: ranks that wait for
#: each other would have the longer limit, too.
at_files = partial(_mark, _file_uses)
#: Mark that this thread waits for other ranks in the body.
waiting = partial(_mark, _waits)


def is_at_files() -> bool:
    """Whether any thread reads or writes a checkpoint: the main thread may wait for one that does."""
    return any([*_file_uses.values()])


def waits_for_ranks(thread: int) -> bool:
    """Whether this thread waits for other ranks by hpcddp's own means, not by a collective of torch's."""
    return _waits[thread] > 0
