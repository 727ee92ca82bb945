"""Whether two runs are the same to the last bit, the first step where they differ, and what else differed."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

from hpcddp.errors import RequestError
from hpcddp.runs.causes import Context, find_causes
from hpcddp.runs.record import RunRecord


class LossDifference(NamedTuple):
    """The first step whose losses differ; None is a loss that is no number."""

    step: int
    losses: tuple[float | None, float | None]

    @property
    def size(self) -> float | None:
        """The second loss less the first."""
        first, second = self.losses
        return None if first is None or second is None else second - first

    @property
    def ulps(self) -> int | None:
        """How many doubles lie between the two, counting one of them."""
        first, second = self.losses
        return None if first is None or second is None else abs(_ordinal(first) - _ordinal(second))


@dataclass(frozen=True, slots=True)
class Comparison:
    """What two runs have in common and where they differ. Pairs are (first run, second run)."""

    paths: tuple[str, str]
    verdict: str  # same | same so far | different
    common_steps: int
    last_steps: tuple[int, int]
    unrecorded: tuple[list[int], list[int]]
    differing_steps: int
    first_difference: LossDifference | None
    equal_weights: list[int]  # steps at which both recorded their weights, and they are the same
    other_weights: list[int]
    differed: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]]
    causes: list[str]

    @property
    def is_same(self) -> bool:
        """Nothing that both runs have differs."""
        return self.verdict != "different"


def compare_runs(first: RunRecord, second: RunRecord) -> Comparison:
    """RequestError if the runs have no step in common."""
    common = sorted(first.steps.keys() & second.steps.keys())
    if not common:
        has = " and ".join(f"{run.path} has steps {min(run.steps)} to {run.last_step}" for run in (first, second))
        raise RequestError(f"no step is in both runs: {has}", "compare two runs that start alike")
    losses = [LossDifference(step, (first.steps[step].loss, second.steps[step].loss)) for step in common]
    differing = [loss for loss in losses if not _same_bits(*loss.losses)]
    recorded = sorted(first.weights.keys() & second.weights.keys())
    equal = [step for step in recorded if first.weights[step] == second.weights[step]]
    other = [step for step in recorded if step not in equal]
    differed = _list_differences(first, second, common)
    last_steps = first.last_step, second.last_step
    if differing or other:
        verdict = "different"
    else:
        verdict = "same" if last_steps[0] == last_steps[1] and last_steps[0] in equal else "same so far"
    # weights of a step are what the loss of the next one is computed from
    begins = min([loss.step for loss in differing[:1]] + [step + 1 for step in other[:1]], default=None)
    context = Context(begins, tuple(differed), _rate_differs_at(first, second, common), first.facts, second.facts)
    return Comparison(
        paths=(first.path, second.path),
        verdict=verdict,
        common_steps=len(common),
        last_steps=last_steps,
        unrecorded=(first.unrecorded, second.unrecorded),
        differing_steps=len(differing),
        first_difference=differing[0] if differing else None,
        equal_weights=equal,
        other_weights=other,
        differed=differed,
        causes=find_causes(context) if verdict == "different" else [],
    )


def _list_differences(
    first: RunRecord, second: RunRecord, common: list[int]
) -> dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """The facts that are not the same in both, and the learning rate at the first step where it is not."""
    names = dict.fromkeys([*first.facts, *second.facts])
    pairs = {name: (first.facts.get(name, ()), second.facts.get(name, ())) for name in names}
    found = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    step = _rate_differs_at(first, second, common)
    if step is not None:
        found[f"lr at step {step}"] = (first.steps[step].lr,), (second.steps[step].lr,)
    return found


def _rate_differs_at(first: RunRecord, second: RunRecord, common: list[int]) -> int | None:
    return next((step for step in common if not _same_bits(first.steps[step].lr, second.steps[step].lr)), None)


def _same_bits(first: float | None, second: float | None) -> bool:
    if first is None or second is None:
        return first is second
    return struct.pack("<d", first) == struct.pack("<d", second)


def _ordinal(number: float) -> int:
    """How many doubles lie between zero and the number, negative below zero; 0 for both zeros."""
    (bits,) = struct.unpack("<q", struct.pack("<d", number))
    ordinal: int = bits if bits >= 0 else -(bits & 0x7FFF_FFFF_FFFF_FFFF)
    return ordinal
