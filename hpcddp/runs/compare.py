"""Whether two runs are the same to the last bit, the first step where they differ, and what else differed."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from hpcddp.errors import RequestError, nearest
from hpcddp.runs.folder import MANIFEST, AttemptFolder, RunFolder, list_attempts, list_checkpoints, list_run_folders
from hpcddp.runs.jsonfile import read_object
from hpcddp.runs.metrics import Line, LogLine, MetricsReader, StepLine
from hpcddp.runs.settings import RUN, read_recorded, settings_at
from hpcddp.runs.state import check_run_folder
from hpcddp.units import format_count, shorten

# What a run ran with, as flat conditions by name: `torch`, `plan.global_batch`, `samples`, `optimizer.momentum`.


# of plan.json, which also holds what only matters to a scheduler
_OF_JOB = ("site", "launcher", "command")


def describe_attempt(versions: dict[str, Any]) -> dict[str, Any]:
    """The conditions of an attempt's versions.json. What is not there is left out."""
    conditions = {name: value for name, value in versions.items() if name not in {"ranks", "plan", "exact"}}
    plan, exact = versions.get("plan") or {}, versions.get("exact")
    conditions |= {f"plan.{name}": value for name, value in plan.items() if name != "data_size"}
    if ranks := versions.get("ranks"):
        hosts = list(dict.fromkeys(rank.get("host") for rank in ranks))
        conditions |= {"ranks": len(ranks), "nodes": len(hosts), "hosts": ", ".join(map(str, hosts))}
    if versions:  # an exact run says its way of summing
        is_exact = bool(exact or plan.get("slices"))
        conditions["mode"] = f"exact ({exact})" if isinstance(exact, str) else "exact" if is_exact else "plain"
    return conditions


def flatten_settings(settings: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The conditions of settings.json, but for the owner and the command, which plan.json has."""
    of_run = {name: value for name, value in settings.get(RUN, {}).items() if name in {"samples", "shuffle"}}
    groups = {group: values for group, values in settings.items() if group != RUN}
    return {f"{group}.{name}": value for group, values in groups.items() for name, value in values.items()} | of_run


# What a run folder records of its run: each step, weights at some steps, and what the run ran with.


Conditions = Mapping[str, tuple[Any, ...]]  # each value that a fact had, in the order of the attempts


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run over all its attempts. A step that was made again is there as it was made last."""

    path: str
    steps: dict[int, StepLine]  # by step, from 1; at least one
    logs: list[LogLine]  # of `rt.log`, in order
    attempts: dict[int, str]  # the name of the attempt that made a step, by step
    weights: dict[int, str]  # SHA-256, by step
    conditions: Conditions

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
    attempts = _read_attempts(run)
    steps, logs, makers = _merge(attempts)
    if not steps:
        raise RequestError(
            f"{path} has no step: nothing was trained in it, or nothing was recorded",
            f"ls {path}/attempts/*/metrics.jsonl",
        )
    weights, recorded = _read_weights(run), read_recorded(run)
    making = set(makers.values())
    parts = [
        {f"job.{name}": value for name, value in (read_object(run.plan) or {}).items() if name in _OF_JOB},
        *(_read_conditions(attempt) for attempt, _ in attempts if attempt in making),
        *(() if recorded is None else map(flatten_settings, (settings_at(recorded, 0), recorded.settings))),
    ]
    return RunRecord(
        path=path,
        steps=dict(sorted(steps.items())),
        logs=logs,
        attempts={step: makers[step].name for step in sorted(makers)},
        weights={step: digest for step, digest in weights.items() if step <= max(steps)},
        conditions=_gather(parts),
    )


def _read_attempts(run: RunFolder) -> list[tuple[AttemptFolder, list[Line]]]:
    """The attempts that made a step, in the order of their first steps' times."""
    if not os.path.isdir(run.attempts):
        is_folder = os.path.isdir(run.path)
        runs = list_run_folders(run.path)
        raise RequestError(
            f"{run.path} is no run folder: it has no attempts/" if is_folder else f"{run.path} is no folder",
            f"one of those in it: {', '.join(runs[:4])}" if runs else "give what --run-dir named, such as runs/digits",
        )
    found = []
    for attempt in list_attempts(run):
        lines = list(MetricsReader(attempt.metrics).read())
        first = next((line.time for line in lines if isinstance(line, StepLine)), None)
        if first is not None:
            found.append((first, attempt, lines))
    return [(attempt, lines) for _, attempt, lines in sorted(found, key=lambda item: item[0])]


def _merge(
    attempts: list[tuple[AttemptFolder, list[Line]]],
) -> tuple[dict[int, StepLine], list[LogLine], dict[int, AttemptFolder]]:
    """Steps by number, what was logged, and which attempt made each step."""
    steps: dict[int, StepLine] = {}
    logs: list[LogLine] = []
    makers: dict[int, AttemptFolder] = {}
    for attempt, lines in attempts:
        for line in lines:
            if isinstance(line, LogLine):
                logs.append(line)
                continue
            if not isinstance(line, StepLine):
                continue
            if line.step in steps:  # made again, after a kill or from the start: what followed it is void, too
                steps = {step: old for step, old in steps.items() if step < line.step}
                logs = [old for old in logs if old.step < line.step]
            steps[line.step], makers[line.step] = line, attempt
    return steps, logs, {step: makers[step] for step in steps}


def _read_weights(run: RunFolder) -> dict[int, str]:
    """SHA-256 of the weights by step, from the checkpoints and the end of the last attempt."""
    weights: dict[int, str] = {}
    for checkpoint in list_checkpoints(run.checkpoints):
        weights |= _weights_of(read_object(os.path.join(checkpoint, MANIFEST)) or {})
    return weights | _weights_of(read_object(run.state) or {})


def _weights_of(content: dict[str, Any]) -> dict[int, str]:
    step, digest = content.get("step"), content.get("weights_sha256")
    return {step: digest} if isinstance(step, int) and isinstance(digest, str) else {}


def _read_conditions(attempt: AttemptFolder) -> dict[str, Any]:
    file = attempt.versions
    try:
        return describe_attempt(read_object(file) or {})
    except (AttributeError, TypeError, ValueError) as error:  # a list where there is an object, or the like
        raise RequestError(f"{file} does not hold what hpcddp writes", f"look at it: head {file}") from error


def _gather(parts: list[dict[str, Any]]) -> dict[str, tuple[Any, ...]]:
    """All values of each fact in order; one that stays is there once."""
    conditions: dict[str, tuple[Any, ...]] = {}
    for part in parts:
        for name, value in part.items():
            before = conditions.get(name, ())
            conditions[name] = before if before and before[-1] == value else (*before, value)
    return conditions


# Where two runs differ.


class LossDifference(NamedTuple):
    """The first step whose losses differ; None is a loss that is no number."""

    step: int
    losses: tuple[float | None, float | None]

    @property
    def size(self) -> float | None:
        """The second loss less the first."""
        first, second = self.losses
        return None if first is None or second is None else second - first


@dataclass(frozen=True, slots=True)
class Comparison:
    """What two runs have in common and where they differ. Pairs are (first run, second run)."""

    runs: tuple[str, str]
    verdict: str  # same | same so far | different
    common_steps: int
    last_steps: tuple[int, int]
    unrecorded_steps: tuple[list[int], list[int]]
    differing_steps: int
    first_difference: LossDifference | None
    equal_weights: list[int]  # steps at which both recorded their weights, and they are the same
    other_weights: list[int]
    differed: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]]

    @property
    def is_same(self) -> bool:
        """Nothing that both runs have differs."""
        return self.verdict != "different"


def compare_runs(first: RunRecord, second: RunRecord) -> Comparison:
    """RequestError if the runs have no step in common."""
    runs, common = (first, second), sorted(first.steps.keys() & second.steps.keys())
    if not common:
        has = " and ".join(f"{run.path} has steps {min(run.steps)} to {run.last_step}" for run in runs)
        raise RequestError(f"no step is in both runs: {has}", "compare two runs that start alike")
    losses = [LossDifference(step, (first.steps[step].loss, second.steps[step].loss)) for step in common]
    differing = [loss for loss in losses if not _same_bits(*loss.losses)]
    recorded = sorted(first.weights.keys() & second.weights.keys())
    equal = [step for step in recorded if first.weights[step] == second.weights[step]]
    other = [step for step in recorded if step not in equal]
    names = {**first.conditions, **second.conditions}
    pairs = {name: (first.conditions.get(name, ()), second.conditions.get(name, ())) for name in names}
    differed = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    rate_at = next((step for step in common if not _same_bits(first.steps[step].lr, second.steps[step].lr)), None)
    if rate_at is not None:
        differed[f"lr at step {rate_at}"] = (first.steps[rate_at].lr,), (second.steps[rate_at].lr,)
    verdict, last_steps = "same so far", (first.last_step, second.last_step)
    if differing or other:
        verdict = "different"
    elif last_steps[0] == last_steps[1] and last_steps[0] in equal:
        verdict = "same"
    return Comparison(
        runs=(first.path, second.path),
        verdict=verdict,
        common_steps=len(common),
        last_steps=last_steps,
        unrecorded_steps=(first.unrecorded, second.unrecorded),
        differing_steps=len(differing),
        first_difference=differing[0] if differing else None,
        equal_weights=equal,
        other_weights=other,
        differed=differed,
    )


def _same_bits(first: float | None, second: float | None) -> bool:
    if first is None or second is None:
        return first is second
    return struct.pack("<d", first) == struct.pack("<d", second)


# A comparison of two runs as text for people, and as JSON values for programs.


_SHOWN_STEPS = 12
_NOTHING_DIFFERED = (
    "nothing that was recorded differed; not recorded are the data beyond their number, the modules of the script, and"
    " libraries other than torch"
)


def format_comparison(result: Comparison) -> str:
    """The verdict, its basis, and a table of what differed."""
    lines = [_say_verdict(result), *_say_losses(result), *_say_weights(result)]
    if result.differed:
        rows = [("", *result.runs), *((name, *map(_say_values, pair)) for name, pair in result.differed.items())]
        widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
        lines += ["", "what differed" if not result.is_same else "what differed all the same"]
        lines += [f"  {a:{widths[0]}}  {b:{widths[1]}}  {c}".rstrip() for a, b, c in rows]
    elif not result.is_same:
        lines += ["", _NOTHING_DIFFERED]
    return "\n".join(lines) + "\n"


def describe_comparison(result: Comparison) -> dict[str, Any]:
    """The same as JSON values. Pairs are lists of two, the first run's first."""
    loss, record = result.first_difference, asdict(result)
    weights = {"equal_at": record.pop("equal_weights"), "differ_at": record.pop("other_weights")}
    first = loss and {"step": loss.step, "loss": loss.losses, "difference": loss.size}
    return {**record, "first_difference": first, "weights": weights}


def _say_verdict(result: Comparison) -> str:
    steps = format_count(result.common_steps, "step")
    if result.verdict == "same":
        return f"the same: {steps}, all losses and the last weights are equal to the last bit"
    if result.verdict == "same so far":
        return f"the same as far as both go: {steps}"
    if result.first_difference is None:
        return f"different: all losses of {steps} are equal, but the weights of step {result.other_weights[0]} are not"
    return f"different from step {result.first_difference.step} on"


def _say_losses(result: Comparison) -> list[str]:
    lines = []
    if result.last_steps[0] != result.last_steps[1]:
        ends = (f"{path} ends at step {step}" for path, step in zip(result.runs, result.last_steps, strict=True))
        lines.append(f"  steps    {', '.join(ends)}")
    for path, steps in zip(result.runs, result.unrecorded_steps, strict=True):
        if steps:
            lines.append(f"  steps    {path} has no loss of step {_say_steps(steps)}: an attempt was killed there")
    if result.first_difference is not None:
        first, second = (_say_value(loss) for loss in result.first_difference.losses)
        lines.append(f"  loss     {first} against {second} at step {result.first_difference.step}")
        lines += [f"           {text}" for text in _say_size(result.first_difference)]
        lines.append(f"           {result.differing_steps} of {result.common_steps} common steps differ")
    return lines


def _say_size(loss: LossDifference) -> list[str]:
    first = loss.losses[0]
    if loss.size is None or first is None:
        return []
    relative = abs(loss.size / first) if first else math.inf
    return [f"the difference is {loss.size:.3g}, {relative:.1g} of the first"]


def _say_weights(result: Comparison) -> list[str]:
    parts = []
    if result.equal_weights:
        parts.append(f"equal at step {_say_steps(result.equal_weights)}")
    if result.other_weights:
        parts.append(f"different at step {_say_steps(result.other_weights)}")
    return [f"  weights  {'; '.join(parts) or 'no step of which both recorded them'}"]


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
    return _rows(read_run(run), kind)


def _rows(record: RunRecord, kind: str) -> list[dict[str, Any]]:
    if kind == "log":
        return [{"step": line.step, **line.numbers, "time": line.time} for line in record.logs]
    return [line._asdict() | {"attempt": record.attempts[step]} for step, line in record.steps.items()]
