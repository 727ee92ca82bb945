"""Whether two runs are the same to the last bit, and the first step where they differ."""

from __future__ import annotations

import os
import struct
from typing import Any

from hpcddp.errors import RequestError, nearest
from hpcddp.record import Record
from hpcddp.runs.folder import RunFolder, list_attempts, list_checkpoints, list_run_folders
from hpcddp.runs.metrics import MetricLine, MetricsReader
from hpcddp.runs.state import Manifest, check_run_folder, read_manifest, read_state
from hpcddp.units import format_count

KINDS = ("step", "log")  # of a table's rows


class RunRecord(Record):
    """One run over all its attempts. A repeated step counts as it was made last."""

    path: str
    steps: dict[int, MetricLine]  # by step, from 1; at least one
    logs: list[MetricLine]  # of `rt.log`, in order
    attempts: dict[int, str]  # the name of the attempt that made a step, by step
    weights: dict[int, str]  # SHA-256, by step

    @property
    def last_step(self) -> int:
        return max(self.steps)

    def loss(self, step: int) -> float | None:
        """None: no number."""
        loss: float | None = self.steps[step].numbers["loss"]
        return loss


def read_run(path: str) -> RunRecord:
    """Read a run folder. RequestError if it is none, has no step, or holds a file that cannot be read."""
    run = RunFolder(path)
    check_run_folder(run)
    if not os.path.isdir(run.attempts):
        runs = list_run_folders(path)
        raise RequestError(
            f"{path} is no run folder: it has no attempts/" if os.path.isdir(path) else f"{path} is no folder",
            f"one of those in it: {', '.join(runs[:4])}" if runs else "give a run's folder; hpcddp status lists them",
        )
    lines = {attempt.name: list(MetricsReader(attempt.metrics).read()) for attempt in list_attempts(run)}
    begins = {name: next((line.time for line in found if line.kind == "step"), None) for name, found in lines.items()}
    steps: dict[int, MetricLine] = {}
    logs: list[MetricLine] = []
    attempts: dict[int, str] = {}
    for _, name in sorted((time, name) for name, time in begins.items() if time is not None):
        for line in lines[name]:
            if line.kind == "log":
                logs.append(line)
            if line.kind != "step":
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
    return RunRecord(path, dict(sorted(steps.items())), logs, attempts, _read_weights(run, max(steps)))


def _read_weights(run: RunFolder, last_step: int) -> dict[int, str]:
    saved = [read_manifest(one) or Manifest() for one in list_checkpoints(run.checkpoints)]
    found = {one.step: one.weights_sha256 for one in saved}
    if (state := read_state(run)) is not None:
        found[state.step] = state.weights_sha256
    return {k: v for k, v in found.items() if isinstance(k, int) and isinstance(v, str) and k <= last_step}


class Comparison(Record):
    """Pairs are of the first run and the second. `first_difference`: its step, both losses and their difference.
    `weights`: the steps at which both recorded theirs, `equal_at` and `differ_at`."""

    runs: tuple[str, str]
    verdict: str  # same | same so far | different
    common_steps: int
    last_steps: tuple[int, int]
    differing_steps: int
    first_difference: dict[str, Any] | None
    weights: dict[str, list[int]]

    @property
    def is_same(self) -> bool:
        return self.verdict != "different"


def compare_runs(first: RunRecord, second: RunRecord) -> Comparison:
    """RequestError if the runs have no step in common."""
    runs, common = (first, second), sorted(first.steps.keys() & second.steps.keys())
    if not common:
        has = " and ".join(f"{run.path} has steps {min(run.steps)} to {run.last_step}" for run in runs)
        raise RequestError(f"no step is in both runs: {has}", "compare two runs that start alike")
    differing = [step for step in common if not _same_bits(first.loss(step), second.loss(step))]
    recorded = sorted(first.weights.keys() & second.weights.keys())
    equal = [step for step in recorded if first.weights[step] == second.weights[step]]
    other = [step for step in recorded if step not in equal]
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
        differing_steps=len(differing),
        first_difference=_compare_losses(first, second, differing[0]) if differing else None,
        weights={"equal_at": equal, "differ_at": other},
    )


def _compare_losses(first: RunRecord, second: RunRecord, step: int) -> dict[str, Any]:
    old, new = first.loss(step), second.loss(step)
    return {"step": step, "loss": (old, new), "difference": None if old is None or new is None else new - old}


def _same_bits(first: float | None, second: float | None) -> bool:
    if first is None or second is None:
        return first is second
    return struct.pack("<d", first) == struct.pack("<d", second)


def format_comparison(result: Comparison) -> str:
    """The verdict, its basis, and where more is recorded."""
    lines = [_format_verdict(result)]
    if result.last_steps[0] != result.last_steps[1]:
        ends = (f"{path} ends at step {step}" for path, step in zip(result.runs, result.last_steps, strict=True))
        lines.append(f"  steps    {', '.join(ends)}")
    if (first := result.first_difference) is not None:
        size, (old, new) = first["difference"], first["loss"]
        lines.append(f"  loss     {old} against {new} at step {first['step']}")
        if size is not None:
            lines.append(f"           the difference is {size:.3g}")
        lines.append(f"           {result.differing_steps} of {result.common_steps} common steps differ")
    kinds = (("equal", result.weights["equal_at"]), ("different", result.weights["differ_at"]))
    weights = "; ".join(f"{kind} at step {', '.join(map(str, steps))}" for kind, steps in kinds if steps)
    lines.append(f"  weights  {weights or 'no step of which both recorded them'}")
    if not result.is_same:
        lines.append(f"hint: what else differs: diff {' '.join(f'{path}/settings.json' for path in result.runs)}")
    return "\n".join(lines) + "\n"


def _format_verdict(result: Comparison) -> str:
    steps, first = format_count(result.common_steps, "step"), result.first_difference
    if result.verdict == "same":
        return f"the same: {steps}, all losses and the last weights are equal to the last bit"
    if result.verdict == "same so far":
        return f"the same as far as both go: {steps}"
    if first is None:
        at = result.weights["differ_at"][0]
        return f"different: all losses of {steps} are equal, but the weights of step {at} are not"
    return f"different from step {first['step']} on"


def read_table(run: str, kind: str = "step") -> list[dict[str, Any]]:
    """One row for each step or call of `rt.log` of a run, in order, as `pandas.DataFrame` takes them. The errors of
    `read_run`; RequestError for another kind."""
    if kind not in KINDS:
        raise RequestError(f"kind {kind!r} is unknown{nearest(str(kind), list(KINDS))}", f"one of {', '.join(KINDS)}")
    if not isinstance(run, (str, os.PathLike)):
        raise RequestError(f"run {run!r} is not the path of a run folder", 'hpcddp.load("runs/train")')
    record = read_run(run)
    if kind == "log":
        return [{"step": line.step, **line.numbers, "time": line.time} for line in record.logs]
    made = ((line, record.attempts[step]) for step, line in record.steps.items())
    return [{"step": line.step, **line.numbers, "time": line.time, "attempt": attempt} for line, attempt in made]
