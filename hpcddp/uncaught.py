"""A mistake that a script does not catch: its two lines, its exit status, and no traceback."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, TypeVar

from hpcddp.errors import HpcddpError
from hpcddp.guard.hpcddp_stand import is_library

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
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


def _report_if_last(error: HpcddpError, line: str = "") -> None:
    """Print the two lines if this very error ends the process. `line`: of the script, `train.py:41`."""
    usual = sys.excepthook

    def report(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if value is error:
            print(f"hpcddp: {line and line + ': '}{value}", file=sys.stderr, flush=True)
            if hasattr(sys, "ps1"):  # at Python's prompt, which goes on
                return
            sys.exit(error.exit_code)
        usual(kind, value, trace)

    sys.excepthook = report


def add_line(kind: type[BaseException], line: Callable[[], str]) -> None:
    """Where an error of this kind ends the process, print this line behind its traceback, unless it is empty."""
    usual = sys.excepthook

    def report(found: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        usual(found, value, trace)
        if issubclass(found, kind) and (told := line()):
            print(told, file=sys.stderr, flush=True)

    sys.excepthook = report


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
                _report_if_last(explained, find_script_line(trace))
            raise
        if isinstance(error, HpcddpError):
            _report_if_last(error, find_script_line(trace))
        return is_handled


def _keep_for_ever(thing: object) -> None:
    """Python would leave a generator that nothing holds any more, and so end what it opened."""
    import ctypes

    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def find_script_line(trace: TracebackType | None) -> str:
    """`train.py:41`, the innermost line of the user's own that an error came through; empty if there is none."""
    found = ""
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        if not is_library(path):
            near = os.path.relpath(path) if os.path.isabs(path) else path
            found = f"{path if near.startswith(os.pardir) else near}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found
