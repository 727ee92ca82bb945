"""The points of a sweep: `{lr: [0.1, 0.01], seed: 1-3}` is six, numbered from 1, the last axis fastest.

Each job of the sweep knows its number only, so the axes give the values again: on the login node, in the job, and where
its run is shown.
"""

from __future__ import annotations

import re

from hpcddp.errors import RequestError
from hpcddp.placeholders import OF_BATCH, OF_LAUNCH, find_code
from hpcddp.record import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    #: name -> its values as they were written
    Axes = Mapping[str, Sequence[str]]

#: More would be a mistake: one run folder each, and more jobs than a scheduler takes in one array.
MOST = 10000
_NAME = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)
_RANGE = re.compile(r"(\d{1,9})-(\d{1,9})(?::([1-9]\d{0,8}))?", re.ASCII)


def read_axes(value: object, where: str) -> dict[str, tuple[str, ...]]:
    """Axes as a job file gives them: each name with a list of values, or a range `1-3` or `0-100:25`, both ends
    included. RequestError for anything else, and for more than MOST points."""
    if not isinstance(value, dict) or not value:
        hint = "--set sweep.lr=0.1,0.01" if where.startswith("--set") else "sweep: {lr: [0.1, 0.01], seed: 1-3}"
        raise RequestError(f"{where} is not a mapping of names to values", hint)
    axes = {str(name): _read_values(str(name), values, where) for name, values in value.items()}
    points = count_points(axes)
    if points > MOST:
        raise RequestError(
            f"{where} has {points} points, and a sweep may have {MOST}", "fewer values, or several sweeps"
        )
    return axes


def count_points(axes: Axes) -> int:
    """How many there are."""
    points = 1
    for values in axes.values():
        points *= len(values)
    return points


def find_point(axes: Axes, number: int) -> dict[str, str]:
    """The values of one point, from 1. RequestError if there is none of that number."""
    if not 1 <= number <= count_points(axes):
        raise RequestError(
            f"index {number} is no point of this sweep, which has {count_points(axes)}",
            "submit the sweep with hpcddp submit, which makes its array",
        )
    left, point = number - 1, dict[str, str]()
    for name, values in list(axes.items())[::-1]:
        left, at = divmod(left, len(values))
        point[name] = values[at]
    return {name: point[name] for name in axes}


def format_point(point: Mapping[str, str]) -> str:
    """`lr=0.1 seed=2`."""
    return " ".join(f"{name}={value}" for name, value in point.items())


def fill_point(command: Sequence[str], point: Mapping[str, str]) -> list[str]:
    """The command with the point's values for its `{name}`; those behind `bash -c` are the shell's own."""
    code = find_code(command)
    names = "|".join(map(re.escape, point))
    form = re.compile(rf"(?<![{{$])\{{({names})\}}")
    return [word if i == code else form.sub(lambda m: point[m[1]], word) for i, word in enumerate(command)]


def check_axes(axes: Axes, command: Sequence[str], keys: Sequence[str]) -> None:
    """RequestError for a name that is neither in the command nor one of `keys`, those of the job file."""
    code = find_code(command)
    words = [word for i, word in enumerate(command) if i != code]
    for name in axes:
        if name in keys:
            continue
        if name in {*OF_LAUNCH, *OF_BATCH}:
            raise RequestError(f"sweep: {{{name}}} is the launch's own number", f"another name than {name}")
        if not any(re.search(rf"(?<![{{$])\{{{re.escape(name)}\}}", word) for word in words):
            behind = " (what stands behind -c is the shell's own)" if code is not None else ""
            raise RequestError(
                f"sweep: {name} is no key of a job file, and {{{name}}} does not stand in the command{behind}",
                f"--{name.replace('_', '-')} {{{name}}} in the command",
            )


def _read_values(name: str, values: object, where: str) -> tuple[str, ...]:
    if not _NAME.fullmatch(name):
        raise RequestError(f"{where}: {name!r} is no name", "letters, digits and _ . -")
    if isinstance(values, str):
        found = _RANGE.fullmatch(values.strip())
        if (found is not None and int(found[1]) > int(found[2])) or re.fullmatch(r"\s*\d+-\d+:0+\s*", values):
            raise RequestError(f"{where}: {name}={values.strip()} is a range without a number in it", f"{name}: 1-3")
        if found is not None and int(found[1]) <= int(found[2]):
            numbers = range(int(found[1]), int(found[2]) + 1, int(found[3] or 1))
            if len(numbers) > MOST:
                raise RequestError(f"{where}: {name} has {len(numbers)} values", f"{MOST} at most")
            return tuple(map(str, numbers))
        values = values.split(",") if values else []
    if not isinstance(values, list) or not values:
        raise RequestError(f"{where}: {name} has no list of values", f"{name}: [0.1, 0.01], or {name}: 1-3")
    for value in values:
        if not isinstance(value, str) or not value or not value.isprintable():
            raise RequestError(f"{where}: {name} has {value!r}, which is no plain value", f"{name}: [0.1, 0.01]")
    twice = next((value for i, value in enumerate(values) if value in values[:i]), None)
    if twice is not None:
        raise RequestError(f"{where}: {name} has {twice} twice", "each value once")
    return tuple(values)
