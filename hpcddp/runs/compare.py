"""Whether two runs are the same to the last bit, the first step where they differ, and what else differed."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from hpcddp.errors import RequestError, nearest
from hpcddp.record import Record
from hpcddp.runs.folder import AttemptFolder, RunFolder, list_attempts, list_checkpoints, list_run_folders
from hpcddp.runs.metrics import LogLine, MetricsReader, StepLine
from hpcddp.runs.settings import RUN_GROUP, read_recorded, settings_at
from hpcddp.runs.state import (
    Manifest,
    Versions,
    check_run_folder,
    read_manifest,
    read_plan_file,
    read_state,
    read_versions,
)
from hpcddp.units import format_count, shorten

# What a run folder records of its run: each step, weights at some steps, and what the run ran with.

_OF_JOB = ("site", "launcher", "command")  # of plan.json, which also holds what only matters to a scheduler


class RunRecord(Record):
    """One run over all its attempts. A repeated step counts as it was made last. `conditions`: what the run ran with,
    by name (`torch`, `plan.global_batch`, `samples`): each value that it had, in the order of the attempts."""

    path: str
    steps: dict[int, StepLine]  # by step, from 1; at least one
    logs: list[LogLine]  # of `rt.log`, in order
    attempts: dict[int, str]  # the name of the attempt that made a step, by step
    weights: dict[int, str]  # SHA-256, by step
    conditions: Mapping[str, tuple[Any, ...]]

    @property
    def last_step(self) -> int:
        return max(self.steps)

    @property
    def unrecorded(self) -> list[int]:
        """Steps without a line: a killed process takes the last step's with it."""
        return [step for step in range(min(self.steps), self.last_step) if step not in self.steps]


def read_run(path: str) -> RunRecord:
    """Read a run folder. RequestError if it is none, has no step, or holds a file that cannot be read."""
    run = RunFolder(path)
    check_run_folder(run)
    if not os.path.isdir(run.attempts):
        runs = list_run_folders(path)
        raise RequestError(
            f"{path} is no run folder: it has no attempts/" if os.path.isdir(path) else f"{path} is no folder",
            f"one of those in it: {', '.join(runs[:4])}" if runs else "give what --run-dir named, such as runs/digits",
        )
    lines = {
        attempt.name: list(MetricsReader(attempt.metrics, is_strict=True).read()) for attempt in list_attempts(run)
    }
    made = {name: [line for line in found if isinstance(line, StepLine)] for name, found in lines.items()}
    steps: dict[int, StepLine] = {}
    logs: list[LogLine] = []
    attempts: dict[int, str] = {}
    for name in sorted(filter(made.get, made), key=lambda name: made[name][0].time):
        for line in lines[name]:
            if isinstance(line, LogLine):
                logs.append(line)
            if not isinstance(line, StepLine):
                continue
            if line.step in steps:  # made again, after a kill or from the start: what followed it is void, too
                steps = {step: old for step, old in steps.items() if step < line.step}
                logs = [old for old in logs if old.step < line.step]
            steps[line.step], attempts[line.step] = line, name
    if not steps:
        raise RequestError(
            f"{path} has no step: nothing was trained in it, or nothing was recorded",
            f"ls {path}/attempts/*/metrics.jsonl",
        )
    attempts = {step: attempts[step] for step in sorted(steps)}
    conditions: dict[str, tuple[Any, ...]] = {}
    for part in _read_conditions(run, [run.attempt(name) for name in dict.fromkeys(attempts.values())]):
        for name, value in part.items():
            before = conditions.get(name, ())
            conditions[name] = before if before[-1:] == (value,) else (*before, value)
    return RunRecord(path, dict(sorted(steps.items())), logs, attempts, _read_weights(run, max(steps)), conditions)


def _read_weights(run: RunFolder, last_step: int) -> dict[int, str]:
    """SHA-256 of the weights by step, from the checkpoints and the end of the last attempt."""
    saved = [read_manifest(one) or Manifest() for one in list_checkpoints(run.checkpoints)]
    found = {one.step: one.weights_sha256 for one in saved}
    if (state := read_state(run)) is not None:
        found[state.step] = state.weights_sha256
    return {k: v for k, v in found.items() if isinstance(k, int) and isinstance(v, str) and k <= last_step}


def _read_conditions(run: RunFolder, attempts: list[AttemptFolder]) -> Iterator[dict[str, Any]]:
    """The job's, each attempt's, and those of settings.json at the begin and at the end."""
    plan = read_plan_file(run)
    yield {f"job.{name}": value for name in _OF_JOB if (value := getattr(plan, name)) is not None}
    for attempt in attempts:
        if (versions := read_versions(attempt)) is not None:
            yield describe_attempt(versions)
    recorded = read_recorded(run)
    for settings in () if recorded is None else (settings_at(recorded, 0), recorded.settings):
        groups = {group: values for group, values in settings.items() if group != RUN_GROUP}
        yield {f"{group}.{name}": value for group, values in groups.items() for name, value in values.items()}
        yield {name: value for name, value in settings.get(RUN_GROUP, {}).items() if name in {"samples", "shuffle"}}


def describe_attempt(versions: Versions) -> dict[str, Any]:
    """The conditions of an attempt's versions.json. What is not there is left out."""
    conditions, plan, exact = dict(versions.others or {}), versions.plan or {}, versions.exact
    conditions |= {f"plan.{name}": value for name, value in plan.items() if name != "data_size"}
    if ranks := versions.ranks:
        hosts = list(dict.fromkeys(rank.get("host") for rank in ranks))
        conditions |= {"ranks": len(ranks), "nodes": len(hosts), "hosts": ", ".join(map(str, hosts))}
    # an exact run says its way of summing
    conditions["mode"] = f"exact ({exact})" if exact else "exact" if plan.get("slices") else "plain"
    return conditions


# Where two runs differ.


class Comparison(Record):
    """Common values and differences of two runs. Pairs are of the first run and the second.
    `first_difference`: `step`, its two losses, and `difference`, the second less the first; a loss that is no number is
    None. `weights`: steps at which both recorded theirs: `equal_at`, `differ_at`."""

    runs: tuple[str, str]
    verdict: str  # same | same so far | different
    common_steps: int
    last_steps: tuple[int, int]
    unrecorded_steps: tuple[list[int], list[int]]
    differing_steps: int
    first_difference: dict[str, Any] | None
    weights: dict[str, list[int]]
    differed: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]]

    @property
    def is_same(self) -> bool:
        """Whether all that both runs have is equal."""
        return self.verdict != "different"


def compare_runs(first: RunRecord, second: RunRecord) -> Comparison:
    """RequestError if the runs have no step in common."""
    runs, common = (first, second), sorted(first.steps.keys() & second.steps.keys())
    if not common:
        has = " and ".join(f"{run.path} has steps {min(run.steps)} to {run.last_step}" for run in runs)
        raise RequestError(f"no step is in both runs: {has}", "compare two runs that start alike")
    differing = [step for step in common if not _same_bits(first.steps[step].loss, second.steps[step].loss)]
    recorded = sorted(first.weights.keys() & second.weights.keys())
    equal = [step for step in recorded if first.weights[step] == second.weights[step]]
    other = [step for step in recorded if step not in equal]
    names = {**first.conditions, **second.conditions}
    pairs = {name: (first.conditions.get(name, ()), second.conditions.get(name, ())) for name in names}
    differed = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    rates = ((step, first.steps[step].lr, second.steps[step].lr) for step in common)
    for step, old, new in [rate for rate in rates if not _same_bits(*rate[1:])][:1]:
        differed[f"lr at step {step}"] = (old,), (new,)
    verdict = "same so far"
    if differing or other:
        verdict = "different"
    elif first.last_step == second.last_step and first.last_step in equal:
        verdict = "same"
    return Comparison(
        runs=(first.path, second.path),
        verdict=verdict,
        common_steps=len(common),
        last_steps=(first.last_step, second.last_step),
        unrecorded_steps=(first.unrecorded, second.unrecorded),
        differing_steps=len(differing),
        first_difference=_difference(first, second, differing[0]) if differing else None,
        weights={"equal_at": equal, "differ_at": other},
        differed=differed,
    )


def _difference(first: RunRecord, second: RunRecord, step: int) -> dict[str, Any]:
    old, new = first.steps[step].loss, second.steps[step].loss
    return {"step": step, "loss": (old, new), "difference": None if old is None or new is None else new - old}


def _same_bits(first: float | None, second: float | None) -> bool:
    if first is None or second is None:
        return first is second
    return struct.pack("<d", first) == struct.pack("<d", second)


# A comparison as text for people.


_SHOWN_STEPS = 12
_NOTHING_DIFFERED = (
    "nothing that was recorded differed; not recorded are the data beyond their number, the modules of the script, and"
    " libraries other than torch"
)


def format_comparison(result: Comparison) -> str:
    """The verdict, its basis, and a table of what differed."""
    lines = [_say_verdict(result)]
    if result.last_steps[0] != result.last_steps[1]:
        ends = (f"{path} ends at step {step}" for path, step in zip(result.runs, result.last_steps, strict=True))
        lines.append(f"  steps    {', '.join(ends)}")
    for path, steps in zip(result.runs, result.unrecorded_steps, strict=True):
        if steps:
            lines.append(f"  steps    {path} has no loss of step {_say_steps(steps)}: an attempt was killed there")
    if (first := result.first_difference) is not None:
        size, (old, new) = first["difference"], first["loss"]
        lines.append(f"  loss     {_say_value(old)} against {_say_value(new)} at step {first['step']}")
        if size is not None:
            share = f", {abs(size / old):.1g} of the first" if old else ""
            lines.append(f"           the difference is {size:.3g}{share}")
        lines.append(f"           {result.differing_steps} of {result.common_steps} common steps differ")
    kinds = (("equal", result.weights["equal_at"]), ("different", result.weights["differ_at"]))
    weights = "; ".join(f"{kind} at step {_say_steps(steps)}" for kind, steps in kinds if steps)
    lines.append(f"  weights  {weights or 'no step of which both recorded them'}")
    if result.differed:
        rows = [("", *result.runs), *((name, *map(_say_values, pair)) for name, pair in result.differed.items())]
        widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
        lines += ["", "what differed" if not result.is_same else "what differed all the same"]
        lines += [f"  {a:{widths[0]}}  {b:{widths[1]}}  {c}".rstrip() for a, b, c in rows]
    elif not result.is_same:
        lines += ["", _NOTHING_DIFFERED]
    return "\n".join(lines) + "\n"


def _say_verdict(result: Comparison) -> str:
    steps, first = format_count(result.common_steps, "step"), result.first_difference
    if result.verdict == "same":
        return f"the same: {steps}, all losses and the last weights are equal to the last bit"
    if result.verdict == "same so far":
        return f"the same as far as both go: {steps}"
    if first is None:
        at = result.weights["differ_at"][0]
        return f"different: all losses of {steps} are equal, but the weights of step {at} are not"
    return f"different from step {first['step']} on"


def _say_steps(steps: list[int]) -> str:
    more = f" and {len(steps) - _SHOWN_STEPS} more" if len(steps) > _SHOWN_STEPS else ""
    return ", ".join(map(str, steps[:_SHOWN_STEPS])) + more


def _say_values(values: tuple[Any, ...]) -> str:
    """A fact over the attempts: `4 -> 2 -> 8`; a dash where it is not recorded."""
    return shorten(" -> ".join(map(_say_value, values))) if values else "-"


def _say_value(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_say_value, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


# A run's numbers as a table: a list of rows, which `pandas.DataFrame` takes as it is.


KINDS = ("step", "log")


def read_table(run: str, kind: str = "step") -> list[dict[str, Any]]:
    """One row for each step or call of `rt.log` of a run, over all its attempts, in order.

    A step that was made again counts as it was made last. See `read_run` for errors; RequestError for another kind.
    """
    if kind not in KINDS:
        raise RequestError(f"kind {kind!r} is unknown{nearest(str(kind), list(KINDS))}", f"one of {', '.join(KINDS)}")
    if not isinstance(run, (str, os.PathLike)):
        raise RequestError(f"run {run!r} is not the path of a run folder", 'hpcddp.load("runs/train")')
    record = read_run(run)
    if kind == "log":
        return [{"step": line.step, **line.numbers, "time": line.time} for line in record.logs]
    return [line._asdict() | {"attempt": record.attempts[step]} for step, line in record.steps.items()]
