"""What takes a while, as a scheduler's answer may, is waited for beside the supervisor, which goes on."""

from __future__ import annotations

import _thread
from _queue import SimpleQueue  # queue would import threading, which costs a tenth of the start

from hpcddp.record import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    T = TypeVar("T")


def ask_beside(question: Callable[[], T]) -> SimpleQueue[T | None]:
    """Where the one answer comes; None from a question that was not answered but has raised an error."""
    answers: SimpleQueue[T | None] = SimpleQueue()

    def ask() -> None:
        answer = None
        try:
            answer = question()
        finally:
            answers.put(answer)

    _thread.start_new_thread(ask, ())
    return answers
