"""How a script leaves the loop over `rt.epochs`: by `break` and `return`, by an exception, or past an error."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from types import TracebackType

from hpcddp.errors import HpcddpError, RequestError

_OWN = "hpcddp.training."


def is_left_by_exception() -> bool:
    """In a generator that is closed now: whether an exception ends the loop over it, and no `break` or `return`.

    Python has put the exception aside here. But its traceback holds the frame of the loop, at the instruction that the
    frame is at; so does no other, since `break` and `return` raise nothing.
    """
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_flags & inspect.CO_GENERATOR and frame.f_back is not None:
        frame = frame.f_back  # a generator between the two, such as a progress bar's, is closed by an exception anyway
    holders = gc.get_referrers(frame)
    return any(isinstance(one, TracebackType) and one.tb_lasti == frame.f_lasti for one in holders)


class CaughtErrors:
    """The first error that hpcddp raised in the loop. As long as the run goes on, the script has caught it."""

    def __init__(self, is_watched: Callable[[], bool]) -> None:
        self._is_watched = is_watched
        self._first: HpcddpError | None = None
        self._thread: int | None = None

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Errors that the training's own rooms make in the body are noted, in the loop."""
        self._thread = get_ident()  # another one's are raised again where the run asks for its result
        HpcddpError.listeners.append(self._note)
        try:
            yield
        finally:
            HpcddpError.listeners.remove(self._note)

    def check(self) -> None:
        """RequestError if there was one."""
        if self._first is not None:
            raise RequestError(
                f"the script caught an error of this run and went on: {self._first.message}", self._first.hint
            ) from self._first

    def _note(self, error: HpcddpError) -> None:
        made_in = sys._getframe(2)
        while made_in.f_code.co_name == "__init__" and made_in.f_back is not None:  # of a kind of error
            made_in = made_in.f_back
        own = str(made_in.f_globals.get("__name__")).startswith(_OWN)
        if self._first is None and own and get_ident() == self._thread and self._is_watched():
            self._first = error
