"""Records of short runs, step by step, and the first difference between two of them."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from hpcddp.guard.hpcddp_stand import is_library

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
    stuck: Mapping[int, str] = {}  # ranks that did not end, and the line of the script that each is at
    took_s: float = 0.0
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


def read_trial(title: str, ranks: int, folder: str, stuck: Iterable[int], took_s: float) -> TrialRecord:
    """What a short run has written into its folder."""
    lines = [_read(f"{folder}/rank-{rank}.jsonl").splitlines(keepends=True) for rank in range(ranks)]
    events = [[json.loads(line) for line in each if line.endswith("\n")] for each in lines]
    places = {rank: find_line_of_stack(_read(f"{folder}/rank-{rank}.stack")) for rank in stuck}
    return TrialRecord(title, ranks, events, places, took_s, _read(f"{folder}/rank-0.out"))


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def find_line_of_stack(stack: str) -> str:
    """Find the innermost line of the script, in no package, in a stack as faulthandler prints it."""
    found = re.findall(r'File "(.+)", line (\d+) in', stack)
    return next((f"{os.path.basename(file)}:{line}" for file, line in found if not is_library(file)), "")


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
        kind = "no GPU" if re.search("CUDA|NVIDIA|NCCL|GPU", error) else "failed"
        return Mismatch(kind, (trial.title,), name=error, rank=rank, ranks=trial.ranks)
    if trial.stuck:
        last = trial.events[min(trial.stuck)][-1:]
        place = (last[0]["opening"], last[0]["step"]) if last else None
        where = ", ".join(f"rank {rank} at {line or '?'}" for rank, line in trial.stuck.items())
        return Mismatch("hang", (trial.title,), place, where, ranks=trial.ranks)
    return None


def find_alone(trial: TrialRecord) -> Mismatch | None:
    """A script of which nothing can be compared: each rank trained by itself, or no optimizer of torch made a step."""
    if not all(trial.steps(rank) for rank in range(trial.ranks)):
        return Mismatch("idle", (trial.title,), ranks=trial.ranks)
    worlds = [event["world"] for rank in range(trial.ranks) for event in trial.of_kind("gradients", rank)]
    return Mismatch("alone", (trial.title,), ranks=trial.ranks) if max(worlds) == 1 else None


def compare_ranks(trial: TrialRecord) -> Mismatch | None:
    """The ranks of one run: their modules, and the gradients and weights of each step."""
    in_parts = any(event["in_parts"] for event in trial.of_kind("gradients"))
    found = []
    for rank in range(1, trial.ranks):
        for order, kind in enumerate(("attributes", "modes", "gradients", "weights")):
            for mine, its in zip(trial.of_kind(kind), trial.of_kind(kind, rank), strict=False):
                name, values = "", None
                if "values" in mine:
                    name = next((n for n, value in mine["values"].items() if its["values"].get(n, value) != value), "")
                    values = (mine["values"][name], its["values"][name]) if name else None
                if not name and ("values" in mine or in_parts or mine["digest"] == its["digest"]):
                    continue
                place = its["opening"], its["step"]
                difference = Mismatch(kind, (trial.title,), place, name, values, rank=rank, ranks=trial.ranks)
                found.append((place, order, difference))
                break
    return min(found, key=lambda one: one[:2])[2] if found else None


class Tolerance(NamedTuple):
    """Relative differences up to which two runs are the same in their first steps."""

    loss: float
    gradient: float


ROUNDING = Tolerance(_LOSS, _GRADIENT)  # of one process with the whole batch and several ranks with their shares
SAME_SUMS = Tolerance(_LOSS, 0.0)  # of the same micro batches on other ranks
SAME_BITS = Tolerance(0.0, 0.0)


def compare_trials(one: TrialRecord, many: TrialRecord, tolerance: Tolerance) -> Mismatch | None:
    """The first step at which two runs differ; else a module that no optimizer trains."""
    mine = [one.steps(rank) for rank in range(one.ranks)]
    its = [many.steps(rank) for rank in range(many.ranks)]
    found = None
    for place in sorted({*mine[0], *(place for steps in its for place in steps)}):
        lacking = next((rank for rank, steps in enumerate(its) if place not in steps), None)
        if place not in mine[0] or lacking is not None:
            found = Mismatch("counts", (), None, "steps", (len(mine[0]), len(its[lacking or 0])), rank=lacking)
        else:
            times = 1.0 if place[1] < _FIRST_STEPS else _LATER
            events, others = ([steps.get(place, []) for steps in run] for run in (mine, its))
            found = _compare_step(events, others, Tolerance(*(times * part for part in tolerance)))
        if found is not None:
            found = found._replace(place=place)
            break
    else:
        for event in many.of_kind("untrained")[-1:]:
            if (far := _farthest(event, tolerance.gradient * _LATER)) is not None:
                found = Mismatch("untrained", (), None, far[1], (far[3], far[2]), far[0])
    return found and found._replace(runs=(one.title, many.title), ranks=many.ranks)


def _compare_step(one: list[list[TraceEvent]], many: list[list[TraceEvent]], tolerance: Tolerance) -> Mismatch | None:
    """Compare the batches, backward passes and optimizers of one step, each by rank."""
    for rank, events in enumerate(many):
        totals = [[(e["total"], e["epoch"]) for e in _of_kind(part, "batch")[:1]] for part in (one[0], events)]
        if totals[0] != totals[1]:
            return Mismatch("batch", (), values=(totals[0], totals[1]), rank=rank)
    losses, theirs = ([_of_kind(events, "loss") for events in run] for run in (one, many))
    if any(len(_of_kind(events, "batch")) != 1 for events in (*one, *many)):  # micro batches: their sum
        losses, theirs = ([_add_up(found) for found in run] for run in (losses, theirs))
    for rank, found in enumerate(theirs):
        if len(found) != len(losses[0]):
            return Mismatch("counts", (), name="rt.backward(…)", values=(len(losses[0]), len(found)), rank=rank)
    for nth in range(len(losses[0])):
        mine, whole = (math.fsum(found[nth]["share"] for found in run) for run in (losses, theirs))
        if (off := _relative(mine, whole)) > tolerance.loss:
            return Mismatch("loss", (), values=(mine, whole), off=off, factor=whole / mine if mine else math.nan)
    for rank, events in enumerate(many):
        steps, calls = _of_kind(one[0], "gradients"), _of_kind(events, "gradients")
        if len(calls) != len(steps):
            return Mismatch("counts", (), name="optimizer.step()", values=(len(steps), len(calls)), rank=rank)
        for step, call in zip(steps, calls, strict=True):
            if (setting := _compare_settings(step, call)) is not None:
                return setting._replace(rank=rank)
            if (far := _farthest(call, tolerance.gradient)) is not None:
                return Mismatch("gradients", (), None, far[1], (far[3], far[2]), far[0], call["factor"], rank)
    for mine_of_rank, its_of_rank in zip(one, many, strict=False) if tolerance == SAME_BITS else ():
        digests = [[e["digest"] for e in _of_kind(events, "weights")] for events in (mine_of_rank, its_of_rank)]
        if digests[0] != digests[1]:
            return Mismatch("weights", ())
    return None


def _add_up(losses: list[TraceEvent]) -> list[TraceEvent]:
    return [{"share": math.fsum(event["share"] for event in losses)}] if losses else []


def _farthest(event: TraceEvent, tolerance: float) -> list[Any] | None:
    """The tensor that is farthest from its reference, if that is farther than the tolerance."""
    off: list[list[Any]] = event.get("off") or []
    return off[0] if off and off[0][0] > tolerance else None


def _compare_settings(one: TraceEvent, other: TraceEvent) -> Mismatch | None:
    for mine, its in zip(one["settings"], other["settings"], strict=False):
        for name, value in mine.items():
            that = its.get(name)
            are_numbers = isinstance(value, float) and isinstance(that, float)
            if value != that and not (are_numbers and _relative(value, that, 0.0) <= _LOSS):
                return Mismatch("settings", (), None, name, (value, that))
    return None


def _of_kind(events: Iterable[TraceEvent], kind: str) -> list[TraceEvent]:
    return [event for event in events if event["kind"] == kind]


def _relative(one: float, other: float, least: float = _SMALL_LOSS) -> float:
    if (math.isnan(one) and math.isnan(other)) or one == other:
        return 0.0
    away = abs(one - other) / max(abs(one), abs(other), least)
    return math.inf if math.isnan(away) else away


def find_other_numbers(one: str, other: str) -> tuple[str, str] | None:
    """The first lines of two outputs that differ in their numbers alone, and by more than rounding."""
    for mine, its in zip(one.splitlines(), other.splitlines(), strict=False):
        if mine.startswith("hpcddp") or _NUMBER.sub("#", mine) != _NUMBER.sub("#", its):
            continue
        numbers = zip(_NUMBER.findall(mine), _NUMBER.findall(its), strict=True)
        if any(_relative(float(a), float(b), 1e-6) > 1e-3 for a, b in numbers):
            return mine, its
    return None
