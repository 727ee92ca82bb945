"""Which checkpoint of a run is the best by a number of the user's. `best.json` beside the checkpoints names it."""

from __future__ import annotations

import os

from hpcddp.record import Record
from hpcddp.runs.folder import name_checkpoint
from hpcddp.runs.jsonfile import damaged, read_record, write_object

_FILE = "best.json"
MODES = ("max", "min")


class Best(Record):
    """The best value so far and the step of its checkpoint. `mode`: whether larger or smaller is better."""

    value: float
    mode: str
    step: int

    def is_beaten_by(self, value: float) -> bool:
        return value > self.value if self.mode == "max" else value < self.value


def read_best(checkpoints: str) -> Best | None:
    """The best of the checkpoints in this folder; None if none was named, or it is no longer there.

    SchemaError if another hpcddp named it; DamagedFileError if the file names none.
    """
    path, remedy = os.path.join(checkpoints, _FILE), "; without the file rt.save_best() begins anew"
    best = read_record(path, Best, remedy)
    if best is not None and best.mode not in MODES:
        raise damaged(path, f"its mode is {best.mode!r}", remedy)
    if best is not None and best.step < 0:
        raise damaged(path, f"its step is {best.step}", remedy)
    return best if best is not None and os.path.exists(name_checkpoint(checkpoints, best.step)) else None


def write_best(checkpoints: str, best: Best) -> None:
    """Name a checkpoint, which is complete, as the best one."""
    write_object(os.path.join(checkpoints, _FILE), best._asdict(), durable=True)
