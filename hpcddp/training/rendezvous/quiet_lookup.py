"""Connect to a store without torch's warning about a name that nobody needs (`ranks/lookup_warning.py`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from hpcddp.ranks.lookup_warning import drop_lookup_warning


@contextmanager
def without_lookup_warning() -> Iterator[None]:
    """Keep stderr back during the body, and print it afterwards without the warning. For bodies of a few seconds.

    C++ writes to the file descriptor, so this is the only place to take the line out.
    """
    try:
        sys.stderr.flush()
        real = os.dup(2)
    except (OSError, ValueError, AttributeError):  # closed, or none at all: nothing will be printed
        yield
        return
    held = os.memfd_create("stderr")
    os.dup2(held, 2)
    try:
        yield
    finally:
        with suppress(OSError, ValueError):
            sys.stderr.flush()
        os.dup2(real, 2)
        os.close(real)
        text = drop_lookup_warning(os.pread(held, os.fstat(held).st_size, 0))
        os.close(held)
        with suppress(OSError):
            os.write(2, text)
