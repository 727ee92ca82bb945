"""How often a run has lost ranks or nodes, as its attempts' folders say it."""

from __future__ import annotations

import os
from contextlib import suppress

from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.runs.folder import list_attempts

if TYPE_CHECKING:
    from hpcddp.runs.folder import AttemptFolder, RunFolder


class Losses(Record):
    """`times`: attempts that have lost ranks. `seconds`: that all attempts together have trained."""

    times: int = 0
    seconds: float = 0.0


def note_loss(attempt: AttemptFolder, cause: str) -> None:
    """This attempt has lost ranks; `cause` is for people. A folder that cannot be written is no reason to end."""
    with suppress(OSError), open(attempt.lost, "w", encoding="utf-8", errors="replace") as file:
        file.write(f"{cause}\n")


def read_losses(run: RunFolder) -> Losses:
    """Of all attempts so far. An attempt has trained from its first rank's start to its last line of metrics."""
    attempts = list_attempts(run) if os.path.isdir(run.attempts) else []
    seconds = 0.0
    for attempt in attempts:
        with suppress(OSError):
            seconds += max(os.stat(attempt.metrics).st_mtime - os.stat(attempt.rank_environment(0)).st_mtime, 0)
    return Losses(sum(os.path.exists(attempt.lost) for attempt in attempts), seconds)
