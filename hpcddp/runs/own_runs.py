"""Runs that the script of a job has opened itself, beside the job's own."""

from __future__ import annotations

import os
from contextlib import suppress

from hpcddp.record import TYPE_CHECKING
from hpcddp.runs.folder import RunFolder, list_attempts
from hpcddp.runs.state import read_state

if TYPE_CHECKING:
    from hpcddp.runs.folder import AttemptFolder
    from hpcddp.runs.state import State


def note_own_run(attempt: AttemptFolder, run: RunFolder) -> None:
    """The script of this attempt has opened a run that is not the job's. What cannot be written is not known."""
    with suppress(OSError), open(_list(attempt), "a", encoding="utf-8", errors="surrogateescape") as file:
        file.write(f"{os.path.abspath(run.path)}\n")


def list_own_runs(attempt: AttemptFolder) -> list[RunFolder]:
    """In the order in which they were opened."""
    with suppress(OSError), open(_list(attempt), encoding="utf-8", errors="surrogateescape") as file:
        return [RunFolder(path) for path in dict.fromkeys(file.read().splitlines())]
    return []


def read_own_states(run: RunFolder) -> list[tuple[RunFolder, State]]:
    """What the ranks wrote last of each run that scripts have opened in any attempt of the job's run. The errors of
    `read_state`."""
    own = dict.fromkeys(one for attempt in list_attempts(run) for one in list_own_runs(attempt))
    return [(one, state) for one in own if (state := read_state(one)) is not None]


def _list(attempt: AttemptFolder) -> str:
    return os.path.join(attempt.path, "own-runs")
