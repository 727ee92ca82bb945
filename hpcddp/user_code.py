"""Which lines of a stack are the user's own: not of Python's library, of an installed package, nor of this one."""

from __future__ import annotations

import linecache
import os
import sysconfig
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import CodeType, TracebackType

_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")})
_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TRAINER = os.path.join(_PACKAGE, "trainer", "")  # a script of its own, as a user's is


def is_library(path: str) -> bool:
    """Whether the file is no part of the user's program."""
    return path.startswith((*_LIBRARIES, "<frozen")) or (path.startswith(_PACKAGE) and not path.startswith(_TRAINER))


def describe_line(code: CodeType, line: int) -> str:
    """`train.py:41, in evaluate: total = rt.sum(total)`."""
    source = linecache.getline(code.co_filename, line).strip()
    where = f"{os.path.basename(code.co_filename)}:{line}, in {code.co_name}"
    return f"{where}: {source}" if source else where


def find_line(trace: TracebackType | None) -> str:
    """`train.py:41`, the innermost line of the user's own that an error came through; empty if there is none."""
    found = ""
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        if not is_library(path):
            near = os.path.relpath(path) if os.path.isabs(path) else path
            found = f"{path if near.startswith(os.pardir) else near}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found
