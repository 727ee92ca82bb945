"""Splits a sweep: one array if only the command changes, else one job for each point."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcddp.errors import RequestError
from hpcddp.runs.command import name_command
from hpcddp.script.spec import FIELDS, KEYS, JobSpec
from hpcddp.sweep import check_axes, count_points, fill_point, find_point

# Keys that the sweep sets itself, or that belong to the whole sweep.
_NOT_SWEPT = (
    *("sweep", "array", "array_limit", "chain", "site", "name", "run_dir", "workdir", "command", "dependency"),
    "resume",
)


def name_run(spec: JobSpec) -> str:
    """The run's name: the one that was given, else that of the command, before the job fills its placeholders. Of a
    sweep it is made of the axes, too: by other values, point 1 is another run."""
    axes = spec.sweep if spec.sweep and count_points(spec.sweep) > 1 else {}
    swept = [f"{name}={','.join(values)}" for name, values in axes.items()]
    return spec.name or name_command([*(spec.command or ()), *swept], indexed=spec.array is not None)


def plan_sweep(spec: JobSpec, arrays: bool) -> JobSpec:
    """The spec of the one job script that the sweep is: its array, or the values of its only point. `arrays`: whether
    the site takes arrays.

    RequestError for a sweep that is several scripts, or that none could be.
    """
    if spec.sweep is None:
        return spec
    source = spec.sources.get("sweep", "sweep")
    check_sweep(spec)
    if count_points(spec.sweep) == 1:
        return _take_point(spec, find_point(spec.sweep, 1), source)
    of_job = next((name for name in spec.sweep if name in KEYS), None)
    if of_job is not None:
        what = f"a sweep of {of_job} is a job script for each value, and this is one script"
        raise RequestError(what, "hpcddp submit queues them all")
    if not arrays:
        what = f"a sweep of {count_points(spec.sweep)} points is as many jobs on this site, and this is one script"
        raise RequestError(what, f"hpcddp submit {source.partition(' in ')[2] or '…'} runs them all")
    array = f"1-{count_points(spec.sweep)}"
    return spec._replace(array=array, sources={**spec.sources, "array": source})


def check_sweep(spec: JobSpec) -> None:
    """RequestError for axes that cannot be swept."""
    axes = spec.sweep or {}
    if spec.array is not None:
        raise RequestError(f"sweep beside array {spec.array}: a sweep makes its own array", "leave out array")
    if spec.resume is not None:
        raise RequestError(f"resume {spec.resume} is one run, and a sweep has one for each point", "leave out resume")
    if spec.chain and is_one_array(spec):
        raise RequestError(
            f"chain {spec.chain} beside sweep: a sweep is one array, and each index would queue the whole array again",
            "leave out chain, or submit each point by itself: --set sweep.NAME=VALUE",
        )
    for name in axes:
        if name in _NOT_SWEPT:
            raise RequestError(f"sweep: {name} cannot be swept", f"leave {name} out of the sweep")
    check_axes(axes, spec.command or (), tuple(KEYS))


def split_points(spec: JobSpec, run_dir: str) -> list[JobSpec]:
    """Make one spec for each point, in order; `run_dir` is the sweep's own folder, beside which each has its run."""
    axes = spec.sweep or {}
    points = (find_point(axes, number) for number in range(1, count_points(axes) + 1))
    return [
        spec._replace(sweep={name: (value,) for name, value in point.items()}, run_dir=f"{run_dir}.{number}")
        for number, point in enumerate(points, 1)
    ]


def is_one_array(spec: JobSpec) -> bool:
    """Only the command changes from point to point."""
    return spec.sweep is not None and count_points(spec.sweep) > 1 and not any(name in KEYS for name in spec.sweep)


def _take_point(spec: JobSpec, point: Mapping[str, str], source: str) -> JobSpec:
    values: dict[str, Any] = {
        FIELDS.get(name, name): KEYS[name](value, f"{name} in {source}")
        for name, value in point.items()
        if name in KEYS
    }
    sources = {**spec.sources, **dict.fromkeys((name for name in point if name in KEYS), source)}
    return spec._replace(**values, command=tuple(fill_point(spec.command or (), point)), sources=sources)
