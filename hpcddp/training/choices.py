"""What the caller of `hpcddp.runtime` decided, as one value."""

from __future__ import annotations

from dataclasses import dataclass

from hpcddp.batchplan import BatchPlan
from hpcddp.training.gradient.exactness import Exactness
from hpcddp.training.keeping.runfolder import RunFolder


@dataclass(frozen=True, slots=True)
class Choices:
    """What the caller of `hpcddp.runtime` decided."""

    plan: BatchPlan
    seed: int
    folder: RunFolder | None
    resume: bool
    save_every: int | None  # steps; None: at the end of each epoch
    keep: int
    checkpoint: str | None = None  # single, sharded, async; None: sharded for models in parts, else single
    exactness: Exactness | None = None
    noise_every: int | None = None  # steps; None: the gradient noise scale is not measured
