"""What a run folder says of its run: a loss for each step, weights at some steps, and what it ran with."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hpcddp.errors import RequestError
from hpcddp.history.facts import describe_attempt, describe_job, describe_objects


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run over all its attempts."""

    path: str
    losses: dict[int, float | None]  # of the global batch, by step from 1; None: no number (NaN or infinite)
    rates: dict[int, float | None]  # learning rates, by step
    weights: dict[int, str]  # SHA-256, by step
    facts: dict[str, tuple[Any, ...]]  # each value that a fact had, in the order of the attempts

    @property
    def last_step(self) -> int:
        return max(self.losses)

    @property
    def unrecorded(self) -> list[int]:
        """Steps without a loss: a killed process takes the last step's with it."""
        return [step for step in range(min(self.losses), self.last_step) if step not in self.losses]


class StepLine(NamedTuple):
    """One step as one attempt recorded it. `time` is in seconds since 1970."""

    step: int
    loss: float | None
    lr: float | None
    time: float


def read_run(folder: str) -> RunRecord:
    """Read a run folder. RequestError if it is none, has no step, or holds a file that cannot be read."""
    path = Path(folder)
    attempts = _read_attempts(path)
    owners: dict[int, tuple[StepLine, Path]] = {}
    for attempt, lines in attempts:
        for line in lines:
            if line.step in owners:  # made again, after a kill or from the start: what followed it is void, too
                owners = {step: owner for step, owner in owners.items() if step < line.step}
            owners[line.step] = line, attempt
    if not owners:
        raise RequestError(
            f"{folder} has no step: nothing was trained in it, or nothing was recorded",
            f"ls {folder}/attempts/*/metrics.jsonl",
        )
    steps = [owners[step][0] for step in sorted(owners)]
    owning = {attempt for _, attempt in owners.values()}
    weights, objects = _read_checkpoints(path)
    parts = [
        describe_job(_read_json(path / "plan.json")),
        *(_read_facts(attempt) for attempt, _ in attempts if attempt in owning),
        *objects,
    ]
    return RunRecord(
        path=folder,
        losses={line.step: line.loss for line in steps},
        rates={line.step: line.lr for line in steps},
        weights={step: digest for step, digest in weights.items() if step <= steps[-1].step},
        facts=_gather(parts),
    )


def _read_attempts(path: Path) -> list[tuple[Path, list[StepLine]]]:
    """The attempts that made a step, in the order of their first steps' times."""
    if not (path / "attempts").is_dir():
        what = "is no run folder: it has no attempts/" if path.is_dir() else "is no folder"
        runs = [f"{entry}" for entry in sorted(path.glob("*")) if (entry / "attempts").is_dir()]
        hint = (
            f"one of those in it: {', '.join(runs[:4])}" if runs else "give what --run-dir named, such as runs/digits"
        )
        raise RequestError(f"{path} {what}", hint)
    files = path.glob("attempts/*/metrics.jsonl")
    found = [(file.parent, list(_read_steps(file))) for file in sorted(files)]
    return sorted(((attempt, lines) for attempt, lines in found if lines), key=lambda item: item[1][0].time)


def _read_steps(file: Path) -> Iterator[StepLine]:
    """The lines about steps. Half a line at the end is what a killed writer leaves, and is passed over."""
    lines = _read_text(file).split("\n")
    for number, text in enumerate(lines, 1):
        if not text:
            continue
        try:
            line = json.loads(text)
            if line["kind"] == "step":
                yield StepLine(int(line["step"]), _number(line["loss"]), _number(line.get("lr")), float(line["time"]))
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            if number == len(lines):
                return
            raise RequestError(
                f"{file}, line {number} cannot be read: {_say(error)}", f"look at it: sed -n {number}p {file}"
            ) from error


def _read_checkpoints(path: Path) -> tuple[dict[int, str], list[dict[str, Any]]]:
    """SHA-256 of the weights by step, from the checkpoints and the end of the last attempt; and what was tracked."""
    weights: dict[int, str] = {}
    objects = []
    for file in sorted(path.glob("checkpoints/step-*/manifest.json")):
        if not file.parent.name.removeprefix("step-").isdigit():
            continue  # damaged, or half removed
        manifest = _read_json(file)
        objects.append(_describe(file, describe_objects, manifest.get("objects") or {}))
        weights |= _weights_of(manifest)
    return weights | _weights_of(_read_json(path / "state.json")), objects


def _weights_of(content: dict[str, Any]) -> dict[int, str]:
    step, digest = content.get("step"), content.get("weights_sha256")
    return {step: digest} if isinstance(step, int) and isinstance(digest, str) else {}


def _read_facts(attempt: Path) -> dict[str, Any]:
    contents = [_read_json(attempt / f"{name}.json") for name in ("versions", "data", "options")]
    return _describe(attempt / "versions.json", describe_attempt, *contents)


def _describe(file: Path, describe: Callable[..., dict[str, Any]], *contents: dict[str, Any]) -> dict[str, Any]:
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


def _read_json(file: Path) -> dict[str, Any]:
    """The object in a file; an empty one if there is no such file."""
    if not file.exists():
        return {}
    try:
        content = json.loads(_read_text(file))
    except ValueError as error:
        raise RequestError(f"{file} cannot be read: {_say(error)}", f"look at it: head {file}") from error
    if not isinstance(content, dict):
        raise RequestError(f"{file} holds no JSON object", f"look at it: head {file}")
    return content


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise RequestError(f"{file} cannot be read: {(error.strerror or '').lower()}", f"ls -l {file}") from error


def _say(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else str(error).lower()


def _number(value: Any) -> float | None:
    """None for null, and for NaN and infinity, which hpcddp writes as null."""
    return float(value) if value is not None and math.isfinite(value) else None
