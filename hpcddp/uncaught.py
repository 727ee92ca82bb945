"""A mistake that a script does not catch: its two lines, its exit status, and no traceback."""

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
        _report_if_last(error)
        raise


def _report_if_last(mine: HpcddpError, line: str = "") -> None:
    """Print the two lines if this very error ends the process. `line`: of the script, `train.py:41`."""
    usual = sys.excepthook

    def report(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if value is mine:
            print(f"hpcddp: {line and line + ': '}{value}", file=sys.stderr, flush=True)
            sys.exit(mine.exit_code)
        usual(kind, value, trace)

    sys.excepthook = report


def _report_with_line(mine: HpcddpError, trace: TracebackType | None) -> None:
    from hpcddp.user_code import find_line  # only when something is wrong already

    _report_if_last(mine, find_line(trace))


class Opening(AbstractContextManager[_T]):
    """`inner` with `two_lines`. A mistake in the `with` body is told with the line of the script that made it.

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
        try:
            with two_lines():
                is_handled = self._inner.__exit__(kind, error, trace)
        except HpcddpError as explained:  # what the body's error comes of
            if error is not None and explained.__cause__ is error:
                _report_with_line(explained, trace)
            raise
        if isinstance(error, HpcddpError):
            _report_with_line(error, trace)
        return is_handled


def _keep_for_ever(thing: object) -> None:
    """Python would leave a generator that nothing holds any more, and so end what it opened."""
    import ctypes

    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
