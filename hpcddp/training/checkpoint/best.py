"""Whether a number of the user's makes a checkpoint the best one of its run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hpcddp.errors import RequestError
from hpcddp.runs.state import MODES, Best


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


def check_same_value(values: Sequence[float]) -> None:
    """RequestError if a rank gave another number than rank 0: each has counted its own share of the data.

    NaN, infinities and 0 are what stands for a number that only rank 0 knows; small differences are rounding's.
    """
    for rank, value in enumerate(values):
        stands_for_none = value == 0 or not math.isfinite(value) or not math.isfinite(values[0])
        if not stands_for_none and not math.isclose(value, values[0], rel_tol=1e-3):
            raise RequestError(
                f"rt.save_best(value) got {values[0]:.6g} on rank 0 and {value:.6g} on rank {rank}: each rank evaluates"
                " its own share of the data",
                "rt.save_best(rt.sum(correct) / samples), with the sums of all ranks",
            )
