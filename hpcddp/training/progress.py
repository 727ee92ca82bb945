"""One line that says how far an epoch is, for a person at a terminal."""

from __future__ import annotations

import sys
import time

_WIDTH = 30
_REDRAW_S = 0.1


class Progress:
    """Draws on stderr, on rank 0, and only if that is a terminal: a log file gets nothing of it."""

    def __init__(self, label: str, total: int, wanted: bool) -> None:
        self._label = label
        self._total = max(total, 1)
        self._drawing = wanted and sys.stderr.isatty()
        self._done = 0
        self._drawn_at = 0.0

    def advance(self) -> None:
        """One of `total` is done."""
        self._done += 1
        now = time.monotonic()
        if self._drawing and (now - self._drawn_at > _REDRAW_S or self._done == self._total):
            self._drawn_at = now
            bar = "#" * (_WIDTH * self._done // self._total)
            sys.stderr.write(f"\r{self._label} [{bar:<{_WIDTH}}] {self._done}/{self._total}")
            sys.stderr.flush()

    def clear(self) -> None:
        """Leave the line empty for what is printed next."""
        if self._drawing:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
