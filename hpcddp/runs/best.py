"""Which checkpoint of a run is the best by a number of the user's. `best.json` beside the checkpoints names it."""

from __future__ import annotations

import os

from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.runs.folder import name_checkpoint
from hpcddp.runs.jsonfile import DamagedFileError, read_object, write_object

if TYPE_CHECKING:
    from typing import Any

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
    path = os.path.join(checkpoints, _FILE)
    hint = f"look at it: head {path}; without the file rt.save_best() begins anew"
    try:
        found = read_object(path)
    except DamagedFileError as error:
        raise DamagedFileError(error.message, hint) from error
    if found is None:
        return None
    fault = _find_fault(found)
    if fault is not None:
        raise DamagedFileError(f"{path} does not name the best checkpoint: {fault}", hint)
    best = Best(found["value"], found["mode"], found["step"])
    return best if os.path.exists(name_checkpoint(checkpoints, best.step)) else None


def write_best(checkpoints: str, best: Best) -> None:
    """Name a checkpoint, which is complete, as the best one."""
    write_object(os.path.join(checkpoints, _FILE), best._asdict(), durable=True)


def _find_fault(found: dict[str, Any]) -> str | None:
    value, step = found.get("value"), found.get("step")
    as_written = {
        "value": type(value) in (int, float) and value == value,  # NaN is never the best
        "mode": found.get("mode") in MODES,
        "step": type(step) is int and step >= 0,
    }
    wrong = [name for name, is_right in as_written.items() if not is_right]
    if not wrong:
        return None
    return f"its {wrong[0]} is {found[wrong[0]]!r}" if wrong[0] in found else f"it has no {wrong[0]}"
