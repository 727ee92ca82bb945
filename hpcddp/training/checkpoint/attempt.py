"""Saves and state of one attempt at a run: when a save is due, how long saves take, who may write, state.json.

The loop of `hpcddp.runtime` and those of frameworks share it. Its methods are called on every rank alike; rank 0
writes.
"""

from __future__ import annotations

from typing import Any

from hpcddp.runs.folder import AttemptFolder
from hpcddp.runs.lock import check_not_taken
from hpcddp.runs.state import AT_ITS_END, note_checkpoint, write_state
from hpcddp.training.activity import at_files
from hpcddp.training.stopping import SaveTimer, StopWatch


class AttemptSaves:
    """`folder` None: nothing is written. `every_s`: seconds of training between two saves; None: time does not say."""

    def __init__(self, folder: AttemptFolder | None, watch: StopWatch, *, is_first: bool, every_s: int | None) -> None:
        self.folder = folder
        self.watch = watch
        self.stop_reason: str | None = None  # is set on all ranks at the same step
        self._writes = is_first and folder is not None
        self.timer = SaveTimer(every_s) if self._writes and every_s is not None else None

    def note_stop(self, reason: str | None) -> None:
        """The ranks agree that the run stops here; the first reason stays."""
        self.stop_reason = self.stop_reason or reason

    @property
    def is_time(self) -> bool:
        """Whether rank 0 is to ask for a save, as the time since the last one has come."""
        return self.timer is not None and self.timer.is_due

    def begin_training(self) -> None:
        """The time until the next save counts from now."""
        if self.timer is not None:
            self.timer.restart()

    @at_files()
    def check_held(self) -> None:
        """HeldError on rank 0 if another attempt has taken the run."""
        if self._writes and self.folder is not None:
            check_not_taken(self.folder.run, self.folder.name)

    def save_begins(self) -> None:
        """All ranks save now. HeldError as of `check_held`."""
        self.check_held()
        self.watch.pace.save_began()

    def save_returns(self) -> None:
        """The training goes on, perhaps beside the save."""
        self.begin_training()
        self.watch.pace.training_resumed()

    def note_saved(self, step: int, epoch: int, seconds: float) -> None:
        """The checkpoint of this step is complete, after so many seconds."""
        self.watch.pace.save_ended(seconds)
        if self.stop_reason is not None:
            self.write("unfinished", self.stop_reason, step, epoch)
        elif self._writes and self.folder is not None:
            with at_files():
                note_checkpoint(self.folder, step=step, epoch=epoch)

    def end(self, step: int, epoch: int, stop_reason: str | None, finished: str | None = None, **more: Any) -> None:
        """The attempt ends without an error: stopped for this reason, else finished. `finished`: why, before its
        end."""
        status = "unfinished" if stop_reason else "finished"
        self.write(status, stop_reason or finished or AT_ITS_END, step, epoch, **more)

    @at_files()
    def write(self, status: str, reason: str, step: int, epoch: int, **more: Any) -> None:
        """Write `state.json`."""
        if self._writes and self.folder is not None:
            write_state(self.folder, status, step=step, epoch=epoch, reason=reason, **more)
