"""`sweep.json`: a folder that is no run but a sweep, or an array; its runs lie beside it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from hpcddp.record import Record
from hpcddp.runs.folder import RunFolder, list_runs
from hpcddp.runs.jsonfile import read_record, write_object


class Sweep(Record):
    """What a folder is made of that is a sweep's, or an array's without axes. `array`: its indices, `1-9%2`."""

    axes: dict[str, list[str]]
    array: str


def note_sweep(run: RunFolder, axes: Mapping[str, Sequence[str]], array: str) -> None:
    """This folder is a sweep's or an array's. OSError if it cannot be written."""
    write_object(run.sweep, Sweep({name: list(values) for name, values in axes.items()}, array)._asdict())


def read_sweep(run: RunFolder) -> Sweep | None:
    """None for a run. DamagedFileError."""
    return read_record(run.sweep, Sweep)


def list_points(run: RunFolder) -> list[RunFolder]:
    """The newest run of each index of a sweep's folder, `NAME.7` or `NAME.7-2`, as far as it is there; of a run's
    folder none. A run with another number is not of the sweep, whatever it is called. DamagedFileError."""
    sweep = read_sweep(run)
    if sweep is None:
        return []
    parent, name = os.path.split(run.path)
    with os.scandir(parent or ".") as entries:
        tails = {entry.name.removeprefix(f"{name}.").partition("-")[0] for entry in entries if entry.name != name}
    numbers = sorted({int(tail) for tail in tails if re.fullmatch(r"0|[1-9]\d*", tail, re.ASCII)})
    of_it = [number for number in numbers if is_in(sweep.array, number)]
    return [found[-1][1] for number in of_it if (found := list_runs(f"{run.path}.{number}"))]


def has_index(run: RunFolder, number: int) -> bool:
    """Whether this is the folder of a sweep or an array with that index. DamagedFileError."""
    sweep = read_sweep(run)
    return sweep is not None and is_in(sweep.array, number)


def is_in(array: str, number: int) -> bool:
    """Whether `1-9%2` has this index."""
    spans = map(read_span, array.partition("%")[0].split(","))
    return any(span is not None and number in span for span in spans)


def read_span(text: str) -> range | None:
    """The indices of `7`, `5-9999` or `7-9:2`; None for another text."""
    found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9})(?::([1-9]\d{0,8}))?)?", text, re.ASCII)
    return range(int(found[1]), int(found[2] or found[1]) + 1, int(found[3] or 1)) if found else None
