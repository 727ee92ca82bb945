"""Records of short runs, step by step, and the first difference between two of them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

_LOSS = 1e-5  # tolerances: what rounding alone never reached in the first steps
_GRADIENT = 1e-4
_FIRST_STEPS, _LATER = 3, 10.0  # then rounding has grown: the tolerances are so many times as large
_SMALL_LOSS = 1e-2  # below it, a loss is compared absolutely
_PEERS = "PeerFailedError"
_NUMBER = re.compile(r"-?\d+\.?\d*(?:[eE][-+]?\d+)?")

TraceEvent = dict[str, Any]
Place = tuple[int, int]  # the opening of a runtime in the script, and the step, from 0


class TrialRecord(NamedTuple):
    """A short run, and what it has recorded."""

    title: str  # such as `2 ranks`
    ranks: int
    events: list[list[TraceEvent]]  # by rank
    stuck: tuple[int, ...] = ()
    took_s: float = 0.0
    stacks: tuple[str, ...] = ()  # where those ranks are
    output: str = ""  # of rank 0

    def of_kind(self, kind: str, rank: int = 0) -> list[TraceEvent]:
        """The events of one kind of this rank."""
        return _of_kind(self.events[rank], kind)

    def steps(self, rank: int = 0) -> dict[Place, list[TraceEvent]]:
        """The events of each step, in order."""
        found: dict[Place, list[TraceEvent]] = {}
        for event in self.events[rank]:
            if event["kind"] in {"batch", "loss", "gradients", "weights"}:
                found.setdefault((event["opening"], event["step"]), []).append(event)
        return found


class Mismatch(NamedTuple):
    """The first thing that differs between two runs, or between the ranks of one; or how one failed."""

    kind: str
    runs: tuple[str, ...]  # their titles
    place: Place | None = None
    name: str = ""  # of a tensor, a setting, an error
    values: tuple[Any, Any] | None = None
    off: float = 0.0  # relative
    factor: float = 1.0  # that fits best
    rank: int | None = None
    ranks: int = 1


def read_events(folder: str, ranks: int) -> list[list[TraceEvent]]:
    """The records of a trial's ranks."""
    found: list[list[TraceEvent]] = []
    for rank in range(ranks):
        found.append([])
        try:
            with open(f"{folder}/rank-{rank}.jsonl", encoding="utf-8") as file:
                found[-1] += [json.loads(line) for line in file if line.endswith("\n")]
        except FileNotFoundError:
            pass
    return found


def find_failure(trial: TrialRecord) -> Mismatch | None:
    """A rank that failed, died, or did not end."""
    failed = []
    for rank in range(trial.ranks):
        end = next(iter(trial.of_kind("end", rank)[-1:]), None)
        if end is None and rank not in trial.stuck:
            failed.append((rank, "the process ended without a word"))
        elif end is not None and end["how"] == "failed":
            failed.append((rank, end["error"]))
    if failed and not (trial.stuck and all(_PEERS in error for _, error in failed)):
        rank, error = min(failed, key=lambda one: (_PEERS in one[1], one[0]))
        return Mismatch("failed", (trial.title,), name=error, rank=rank, ranks=trial.ranks)
    if trial.stuck:
        last = trial.events[trial.stuck[0]][-1:]
        place = (last[0]["opening"], last[0]["step"]) if last else None
        over = [rank for rank in range(trial.ranks) if rank not in trial.stuck]
        stands = zip(trial.stuck, trial.stacks, strict=False)
        where = ", ".join(f"rank {rank} at {line}" for rank, line in stands if line)
        return Mismatch("hang", (trial.title,), place, where, (over, list(trial.stuck)), ranks=trial.ranks)
    return None


def find_alone(trial: TrialRecord) -> Mismatch | None:
    """A script of which nothing can be compared: each rank trained by itself, or no optimizer of torch made a step."""
    if not all(trial.steps(rank) for rank in range(trial.ranks)):
        return Mismatch("idle", (trial.title,), ranks=trial.ranks)
    worlds = [event["world"] for rank in range(trial.ranks) for event in trial.of_kind("gradients", rank)]
    return Mismatch("alone", (trial.title,), ranks=trial.ranks) if max(worlds) == 1 else None


def compare_ranks(trial: TrialRecord) -> Mismatch | None:
    """The ranks of one run: their modules, and the gradients and weights of each step."""
    in_parts = any(e["cut"] for e in trial.of_kind("opened")) or any(e["in_parts"] for e in trial.of_kind("weights"))
    found = []
    for rank in range(1, trial.ranks):
        for order, kind in enumerate(("attributes", "modes", "gradients", "weights")):
            for mine, its in zip(trial.of_kind(kind), trial.of_kind(kind, rank), strict=False):
                place = its["opening"], its["step"]
                values: tuple[str, Any] = ("", None)
                if kind in {"attributes", "modes"}:
                    pairs = ((name, (v, its["values"].get(name, v))) for name, v in mine["values"].items())
                    values = next(((name, two) for name, two in pairs if two[0] != two[1]), values)
                    if not values[0] and (mine["step"], mine["opening"]) == (its["step"], its["opening"]):
                        continue
                elif in_parts or mine["digest"] == its["digest"]:
                    continue
                difference = Mismatch(kind, (trial.title,), place, *values, rank=rank, ranks=trial.ranks)
                found.append((place, order, difference))
                break
    return min(found, key=lambda one: one[:2])[2] if found else None


def compare_whole(one: TrialRecord, many: TrialRecord) -> Mismatch | None:
    """Compare one process with the whole batch to several ranks with their shares: equal but for rounding."""
    steps = [many.steps(rank) for rank in range(many.ranks)]
    found = _compare_steps(one.steps(), steps, _compare_step)
    if found is None:
        far = next((far for event in many.of_kind("untrained") if (far := _farthest(event, _GRADIENT * _LATER))), None)
        if far is not None:
            found = Mismatch("untrained", (), None, far[1], (far[3], far[2]), far[0])
    return found and found._replace(runs=(one.title, many.title), ranks=many.ranks)


def compare_bits(one: TrialRecord, other: TrialRecord, *, same_ranks: bool) -> Mismatch | None:
    """Two runs that are to be equal to the bit: the gradients that reach the optimizers; with `same_ranks` also each
    rank's losses and weights."""

    def compare(mine: list[TraceEvent], others: list[list[TraceEvent]], _times: float) -> Mismatch | None:
        return _compare_step_bits(mine, others[0], all_of_it=same_ranks)

    found = None
    for rank in range(one.ranks if same_ranks else 1):
        found = found or _compare_steps(one.steps(rank), [other.steps(rank)], compare)
    ends = [[e["digest"] for e in trial.of_kind("untrained")] for trial in (one, other)]
    if found is None and same_ranks and ends[0][-1:] != ends[1][-1:]:
        far = _farthest(other.of_kind("untrained")[-1], 0.0) or [0.0, "", 0.0, 0.0]
        found = Mismatch("untrained", (), None, far[1], (far[3], far[2]), far[0])
    return found and found._replace(runs=(one.title, other.title), ranks=other.ranks)


_Compare = Callable[[list[TraceEvent], list[list[TraceEvent]], float], Mismatch | None]


def _compare_steps(
    one: dict[Place, list[TraceEvent]], many: list[dict[Place, list[TraceEvent]]], compare: _Compare
) -> Mismatch | None:
    """The first difference, by step."""
    for place in sorted({*one, *(place for steps in many for place in steps)}):
        lacking = next((rank for rank, steps in enumerate(many) if place not in steps), None)
        if place not in one or lacking is not None:
            return Mismatch("steps", (), place, values=(len(one), len(many[lacking or 0])), rank=lacking)
        found = compare(one[place], [steps[place] for steps in many], 1.0 if place[1] < _FIRST_STEPS else _LATER)
        if found is not None:
            return found._replace(place=place)
    return None


def _compare_step(one: list[TraceEvent], many: list[list[TraceEvent]], times: float) -> Mismatch | None:
    """Compare the backward passes and optimizers of one step. `times`: the tolerances are so many times as large."""
    count = len(_of_kind(one, "batch"))
    for rank, events in enumerate(many):
        totals = [[(e["total"], e["epoch"]) for e in _of_kind(part, "batch")[:1]] for part in (one, events)]
        if totals[0] != totals[1]:
            return Mismatch("batch", (), values=(totals[0], totals[1]), rank=rank)
    losses, theirs = _of_kind(one, "loss"), [_of_kind(events, "loss") for events in many]
    if count != 1 or any(len(_of_kind(events, "batch")) != 1 for events in many):  # micro batches: their sum
        losses, theirs = _add_up(losses), [_add_up(found) for found in theirs]
    for rank, found in enumerate(theirs):
        if len(found) != len(losses):
            return Mismatch("passes", (), values=(len(losses), len(found)), rank=rank)
    for nth, event in enumerate(losses):
        mine, whole = event["share"], math.fsum(found[nth]["share"] for found in theirs)
        if (off := _relative(mine, whole)) > _LOSS * times:
            return Mismatch("loss", (), values=(mine, whole), off=off, factor=whole / mine if mine else math.nan)
    steps = _of_kind(one, "gradients")
    for rank, events in enumerate(many):
        calls = _of_kind(events, "gradients")
        if len(calls) != len(steps):
            return Mismatch("calls", (), values=(len(steps), len(calls)), rank=rank)
        for mine, its in zip(steps, calls, strict=True):
            if (setting := _compare_settings(mine, its)) is not None:
                return Mismatch("settings", (), None, setting[0], setting[1:], rank=rank)
            if (far := _farthest(its, _GRADIENT * times)) is not None:
                return Mismatch("gradients", (), None, far[1], (far[3], far[2]), far[0], its["factor"], rank)
    return None


def _compare_step_bits(one: list[TraceEvent], other: list[TraceEvent], *, all_of_it: bool) -> Mismatch | None:
    kinds = ("loss", "gradients", "weights") if all_of_it else ("gradients",)
    for kind in kinds:
        mine, its = _of_kind(one, kind), _of_kind(other, kind)
        if len(mine) != len(its):
            return Mismatch("passes" if kind == "loss" else "calls", (), values=(len(mine), len(its)))
        for a, b in zip(mine, its, strict=True):
            if kind == "loss" and a["value"] != b["value"]:
                values = a["value"], b["value"]
                return Mismatch("loss", (), values=values, off=_relative(*values))
            if kind == "gradients" and (setting := _compare_settings(a, b)) is not None:
                return Mismatch("settings", (), None, setting[0], setting[1:])
            if kind != "loss" and a["digest"] != b["digest"]:
                far = _farthest(b, 0.0) or [0.0, "", b.get("norm"), a.get("norm")]
                return Mismatch(kind, (), None, far[1], (far[3], far[2]), far[0], b.get("factor", 1.0))
    return None


def _add_up(losses: list[TraceEvent]) -> list[TraceEvent]:
    return [{"share": math.fsum(event["share"] for event in losses)}] if losses else []


def _farthest(event: TraceEvent, tolerance: float) -> list[Any] | None:
    """The tensor that is farthest from its reference, if that is farther than the tolerance."""
    off: list[list[Any]] = event.get("off") or []
    return off[0] if off and off[0][0] > tolerance else None


def _compare_settings(one: TraceEvent, other: TraceEvent) -> tuple[str, Any, Any] | None:
    for mine, its in zip(one["settings"], other["settings"], strict=False):
        for name, value in mine.items():
            that = its.get(name)
            are_numbers = isinstance(value, float) and isinstance(that, float)
            if value != that and not (are_numbers and _relative(value, that, 0.0) <= _LOSS):
                return name, value, that
    return None


def _of_kind(events: Iterable[TraceEvent], kind: str) -> list[TraceEvent]:
    return [event for event in events if event["kind"] == kind]


def _relative(one: float, other: float, least: float = _SMALL_LOSS) -> float:
    if (math.isnan(one) and math.isnan(other)) or one == other:
        return 0.0
    away = abs(one - other) / max(abs(one), abs(other), least)
    return math.inf if math.isnan(away) else away


def list_other_numbers(one: str, other: str) -> Iterator[tuple[str, str]]:
    """Lines of two outputs that differ in their numbers alone, and by more than rounding."""
    for mine, its in zip(one.splitlines(), other.splitlines(), strict=False):
        if mine.startswith("hpcddp") or _NUMBER.sub("#", mine) != _NUMBER.sub("#", its):
            continue
        numbers = zip(_NUMBER.findall(mine), _NUMBER.findall(its), strict=True)
        if any(_relative(float(a), float(b), 1e-6) > 1e-3 for a, b in numbers):
            yield mine, its
