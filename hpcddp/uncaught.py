"""An error that a script does not catch: its two lines and its exit status, where no line of the script explains it."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, TypeVar

from hpcddp.errors import HpcddpError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

_T = TypeVar("_T")


@contextmanager
def two_lines() -> Iterator[None]:
    """An HpcddpError passes. If this very error ends the process, its two lines are printed, and no traceback."""
    try:
        yield
    except HpcddpError as error:
        mine, usual = error, sys.excepthook

        def report(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
            if value is mine:
                print(f"hpcddp: {value}", file=sys.stderr, flush=True)
                sys.exit(mine.exit_code)
            usual(kind, value, trace)

        sys.excepthook = report
        raise


class Opening(AbstractContextManager[_T]):
    """`inner` with `two_lines` up to the `with` body: until there an error is about how the script was started. In the
    body a line of the script explains it.

    A process that the body has forked off leaves `inner` to the one that entered it: a run ends once.
    """

    def __init__(self, inner: AbstractContextManager[_T]) -> None:
        self._inner = inner
        self._process = 0

    def __enter__(self) -> _T:
        self._process = os.getpid()
        with two_lines():
            return self._inner.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if os.getpid() != self._process:
            _keep_for_ever(self._inner)
            return None
        return self._inner.__exit__(kind, error, trace)


def _keep_for_ever(thing: object) -> None:
    """Python would leave a generator that nothing holds any more, and so end what it opened."""
    import ctypes

    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
