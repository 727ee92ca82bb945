"""A mistake that a script does not catch: its two lines, its exit status, and no traceback."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, contextmanager
from traceback import walk_tb
from typing import TYPE_CHECKING, NoReturn, TypeVar

from hpcddp.errors import HpcddpError, RequestError
from hpcddp.guard.hpcddp_stand import is_library

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

_T = TypeVar("_T")
# Python has one hook for the error that ends a process: the first error of hpcddp's puts `_report` there.
_last: tuple[HpcddpError, str] | None = None  # the newest error, and the line of the script that made it
_lines: list[tuple[type[BaseException], Callable[[], str]]] = []
_replaced: Callable[..., object] | None = None  # the hook of the script or a library, which is called by `_report`


@contextmanager
def two_lines() -> Iterator[None]:
    """An HpcddpError passes. If this very error ends the process, its two lines are printed, and no traceback."""
    try:
        yield
    except HpcddpError as error:
        _report_if_last(error)
        raise


def _report(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
    if _last is not None and value is _last[0]:
        error, line = _last
        print(f"hpcddp: {line and line + ': '}{error}", file=sys.stderr, flush=True)
        if hasattr(sys, "ps1"):  # at Python's prompt, which goes on
            return
        sys.exit(error.exit_code)
    (_replaced or sys.__excepthook__)(kind, value, trace)
    for of_kind, make_line in _lines:
        if issubclass(kind, of_kind) and (text := make_line()):
            print(text, file=sys.stderr, flush=True)


def _hook() -> None:
    global _replaced  # Python has one hook
    if _replaced is None:
        _replaced, sys.excepthook = sys.excepthook, _report


def _report_if_last(error: HpcddpError, line: str = "") -> None:
    """Print the two lines if this very error ends the process. `line`: of the script, `train.py:41`."""
    global _last  # the process ends once
    _last = error, line
    _hook()


def add_line(kind: type[BaseException], line: Callable[[], str]) -> None:
    """Print this line, unless it is empty, behind the traceback of an error of this kind that ends the process."""
    _lines.append((kind, line))
    _hook()


class Opening(AbstractContextManager[_T]):
    """`inner` with `two_lines`. A mistake in the `with` body is printed with the line of the script that made it.

    `call`: that made it, and `name`: of what it opens, for the error where a script uses it without `with`.
    """

    def __init__(self, inner: AbstractContextManager[_T], call: str, name: str) -> None:
        self._inner, self._call, self._name = inner, call, name

    def __getattr__(self, attribute: str) -> NoReturn:
        if attribute.startswith("_"):  # what Python and its tools ask any object
            raise AttributeError(attribute)
        with two_lines():
            raise RequestError(f"{self._call} is not open yet", f"with {self._call} as {self._name}:")

    def __enter__(self) -> _T:
        with two_lines():
            return self._inner.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        try:
            with two_lines():
                is_handled = self._inner.__exit__(kind, error, trace)
        except HpcddpError as explained:  # the cause of the body's error
            if error is not None and explained.__cause__ is error:
                _report_if_last(explained, find_script_line(trace))
            raise
        if isinstance(error, HpcddpError):
            _report_if_last(error, find_script_line(trace))
        return is_handled


def find_script_line(trace: TracebackType | None) -> str:
    """`train.py:41`, the innermost line of the user's own that an error came through; empty if there is none."""
    # An error of hpcddp's is made in hpcddp's own code: the line to mend is further out, and no traceback is printed.
    lines = [(frame.f_code.co_filename, line) for frame, line in walk_tb(trace)]
    path, line = next(((path, line) for path, line in reversed(lines) if not is_library(path)), ("", 0))
    near = os.path.relpath(path) if os.path.isabs(path) else path
    return path and f"{path if near.startswith(os.pardir) else near}:{line}"
