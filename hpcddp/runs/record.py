"""What a run folder records of its run: each step, weights at some steps, and what the run ran with."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hpcddp.errors import RequestError
from hpcddp.runs.facts import describe_attempt, describe_job, list_object_facts
from hpcddp.runs.folder import MANIFEST, AttemptFolder, RunFolder, list_attempts, list_checkpoints, list_run_folders
from hpcddp.runs.jsonfile import read_object
from hpcddp.runs.metrics_reader import AtLine, Line, LogLine, MetricsReader, StepLine
from hpcddp.runs.opening import check_run_folder


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run over all its attempts. A step that was made again is there as it was made last."""

    path: str
    steps: dict[int, StepLine]  # by step, from 1; at least one
    logs: list[LogLine]  # of `rt.log`, in order
    attempts: dict[int, str]  # the name of the attempt that made a step, by step
    weights: dict[int, str]  # SHA-256, by step
    facts: dict[str, tuple[Any, ...]]  # each value that a fact had, in the order of the attempts

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
    weights, objects = _read_checkpoints(run)
    making = set(makers.values())
    parts = [
        describe_job(read_object(run.plan) or {}),
        *(_read_facts(attempt) for attempt, _ in attempts if attempt in making),
        *objects,
    ]
    return RunRecord(
        path=path,
        steps=dict(sorted(steps.items())),
        logs=logs,
        attempts={step: makers[step].name for step in sorted(makers)},
        weights={step: digest for step, digest in weights.items() if step <= max(steps)},
        facts=_gather(parts),
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
            if isinstance(line, AtLine):
                continue
            if line.step in steps:  # made again, after a kill or from the start: what followed it is void, too
                steps = {step: old for step, old in steps.items() if step < line.step}
                logs = [old for old in logs if old.step < line.step]
            steps[line.step], makers[line.step] = line, attempt
    return steps, logs, {step: makers[step] for step in steps}


def _read_checkpoints(run: RunFolder) -> tuple[dict[int, str], list[dict[str, Any]]]:
    """SHA-256 of the weights by step, from the checkpoints and the end of the last attempt; and what was tracked."""
    weights: dict[int, str] = {}
    objects = []
    for checkpoint in list_checkpoints(run.checkpoints):
        file = os.path.join(checkpoint, MANIFEST)
        manifest = read_object(file) or {}
        objects.append(_describe(file, list_object_facts, manifest.get("objects") or {}))
        weights |= _weights_of(manifest)
    return weights | _weights_of(read_object(run.state) or {}), objects


def _weights_of(content: dict[str, Any]) -> dict[int, str]:
    step, digest = content.get("step"), content.get("weights_sha256")
    return {step: digest} if isinstance(step, int) and isinstance(digest, str) else {}


def _read_facts(attempt: AttemptFolder) -> dict[str, Any]:
    contents = [read_object(file) or {} for file in (attempt.versions, attempt.data)]
    return _describe(attempt.versions, describe_attempt, *contents)


def _describe(file: str, describe: Callable[..., dict[str, Any]], *contents: dict[str, Any]) -> dict[str, Any]:
    try:
        return describe(*contents)
    except (AttributeError, TypeError, ValueError) as error:  # a list where there is an object, or the like
        raise RequestError(f"{file} does not hold what hpcddp writes", f"look at it: head {file}") from error


def _gather(parts: list[dict[str, Any]]) -> dict[str, tuple[Any, ...]]:
    """All values of each fact in order; one that stays is there once."""
    facts: dict[str, tuple[Any, ...]] = {}
    for part in parts:
        for name, value in part.items():
            before = facts.get(name, ())
            facts[name] = before if before and before[-1] == value else (*before, value)
    return facts
