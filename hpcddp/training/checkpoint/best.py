"""Whether a number of the user's makes a checkpoint the best one of its run."""

from __future__ import annotations

from hpcddp.errors import RequestError
from hpcddp.runs.best import MODES, Best


def is_better(value: float, mode: str, best: Best | None) -> bool:
    """Whether `value` beats the best one; NaN never does. RequestError for another mode than before."""
    if mode not in MODES:
        raise RequestError(f"rt.save_best(value, {mode!r}): there is no such mode", 'mode="max", or mode="min"')
    if best is None:
        return value == value
    if best.mode != mode:
        raise RequestError(
            f"the best checkpoint of this run, of step {best.step}, was chosen by mode={best.mode!r}, not {mode!r}",
            f"rt.save_best(value, {best.mode!r}), or a new run",
        )
    return best.is_beaten_by(value)
