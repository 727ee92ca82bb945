"""What an exact result was computed with. A checkpoint's manifest carries it from attempt to attempt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from hpcddp.errors import RequestError
from hpcddp.training.options import Exactness
from hpcddp.training.versions import list_conditions, name_differences


class Provenance(NamedTuple):
    """The sums that were chosen, the hardware and software that computed them, and what changed on the way."""

    method: str
    slices: int
    global_batch: int
    conditions: dict[str, Any]
    deviations: tuple[str, ...]  # why the result may differ from that of a run without interruption


def make_provenance(exactness: Exactness, global_batch: int, device: torch.device) -> Provenance:
    """The provenance of a run that starts here."""
    return Provenance(exactness.method, exactness.slices, global_batch, list_conditions(device), ())


def continue_provenance(mine: Provenance, manifest: Mapping[str, Any], step: int, anew: str) -> Provenance:
    """The provenance of this attempt, which resumes from a checkpoint with this manifest.

    RequestError if the method, the slices or the global batch differ, which the user chose. A difference in hardware
    or software becomes a deviation.
    """
    if "exact" not in manifest:
        return mine._replace(deviations=(f"steps 1 to {step} were not exact",))
    theirs = Provenance(**{name: manifest["exact"][name] for name in Provenance._fields})
    for name in ("method", "slices", "global_batch"):
        if getattr(mine, name) != getattr(theirs, name):
            words = name.replace("_", " ")
            raise RequestError(
                f"this exact run has {words} {getattr(mine, name)}, its checkpoint of step {step} has"
                f" {getattr(theirs, name)}: it would not be the same training",
                f"resume with {words} {getattr(theirs, name)}, or {anew}",
            )
    new = [f"after step {step}, {words}" for words in name_differences(theirs.conditions, mine.conditions)]
    return mine._replace(deviations=(*theirs.deviations, *new))
