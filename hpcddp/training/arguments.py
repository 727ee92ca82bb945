"""Reads the arguments that a script gives: a value that cannot be right is refused at once, by its name."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Sequence
from numbers import Real
from typing import Any, NamedTuple

from hpcddp.errors import RequestError
from hpcddp.units import parse_walltime


def read_whole(value: Any, call: str, *, least: int = 1) -> int:
    """A whole number of `least` or more; one of numpy's is one. `call`: where it is given, with {} in its place."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise _refuse(value, call, f"not a whole number of {least} or more", max(least, 1))
    return number


def read_optional(value: Any, call: str) -> int | None:
    """A whole number of 1 or more, or None."""
    return None if value is None else read_whole(value, call)


class SaveEvery(NamedTuple):
    """How often a run saves: every so many steps, or after so many seconds of training."""

    steps: int | None = None
    seconds: int | None = None

    def __repr__(self) -> str:
        """The text in a script."""
        return repr(self.steps) if self.seconds is None else repr(f"{self.seconds}s")


def read_save_every(value: Any, call: str) -> SaveEvery:
    """Read a number of steps, a time such as "10m", or None."""
    if not isinstance(value, str):
        return SaveEvery(steps=read_optional(value, call))
    try:
        return SaveEvery(seconds=parse_walltime(value))
    except RequestError:
        raise _refuse(value, call, "neither a number of steps nor a time", "10m") from None


def read_timeout(value: Any, call: str) -> float | None:
    """A number above 0, or None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < math.inf:
        raise _refuse(value, call, "no number of seconds", 1800)
    return float(value)


def read_value(value: Any, call: str) -> float:
    """A number, or a tensor or array of one element."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # torch's word for more elements
        raise _refuse(value, call, "not one number", 0.5) from None


def read_path(value: Any, call: str) -> str | None:
    """A path, as text or as a Path; or None."""
    if value is not None and not isinstance(value, str | os.PathLike):
        raise _refuse(value, call, "no path", "runs/train")
    return None if value is None else os.fspath(value)


def read_names(value: Any) -> tuple[str, ...]:
    """A name, or several."""
    return (value,) if isinstance(value, str) else tuple(value)


def check_choice(value: Any, known: Sequence[str], call: str) -> None:
    """RequestError for none of these words."""
    if value not in known:
        raise RequestError(f"{call.format(repr(value))}: there is no such one", f"one of {', '.join(known)}")


def _refuse(value: Any, call: str, what: str, example: object) -> RequestError:
    shown = repr(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
    return RequestError(f"{call.format(shown)}: {shown} is {what}", call.format(repr(example)))
