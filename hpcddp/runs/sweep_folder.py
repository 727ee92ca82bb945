"""`sweep.json`: a folder that is no run but a sweep, or an array; its runs lie beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpcddp.runs.folder import RunFolder
from hpcddp.runs.jsonfile import read_object, write_object


def note_sweep(run: RunFolder, axes: Mapping[str, Sequence[str]], array: str) -> None:
    """This folder is a sweep's, or an array's without axes. OSError if it cannot be written."""
    about = {"axes": {name: list(values) for name, values in axes.items()}, "array": array}
    write_object(run.sweep, about)


def read_sweep(run: RunFolder) -> tuple[dict[str, list[str]], str] | None:
    """The axes and the indices of a sweep's folder; None for a run."""
    content = read_object(run.sweep)
    if content is None:
        return None
    axes = content.get("axes")
    whole = {
        str(name): [str(value) for value in values]
        for name, values in (axes.items() if isinstance(axes, dict) else ())
        if isinstance(values, list) and values
    }
    return whole, str(content.get("array") or "")
