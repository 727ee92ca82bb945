"""Reads the arguments that a script gives: what cannot be meant is refused at once, by its name, in two lines."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Sequence, Set
from numbers import Real
from pathlib import Path
from types import UnionType
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
        raise RequestError(
            f"{call.format(repr(value))}: {_say(value)} is not a whole number of {least} or more",
            call.format(max(least, 1)),
        )
    return number


def read_optional(value: Any, call: str, *, least: int = 1) -> int | None:
    """The same, or None."""
    return None if value is None else read_whole(value, call, least=least)


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
        raise RequestError(
            f"{call.format(repr(value))}: {value!r} is neither a number of steps nor a time", call.format(repr("10m"))
        ) from None


def read_timeout(value: Any, call: str) -> float | None:
    """A number above 0, or None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < math.inf:
        raise RequestError(f"{call.format(repr(value))}: {_say(value)} is no number of seconds", call.format("1800"))
    return float(value)


def read_value(value: Any, call: str) -> float:
    """A number, or a tensor or array of one element."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # torch's word for more elements
        shape = tuple(getattr(value, "shape", ()))
        what = f"a {type(value).__name__} of shape {shape}" if shape else _say(value)
        raise RequestError(f"{call.format('value')}: {what} is not one number", call.format("accuracy")) from None


def read_path(value: Any, call: str) -> Path:
    """A path, as text or as a Path."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise RequestError(f"{call.format(repr(value))}: {_say(value)} is no path", call.format('"model.pt"'))
    return Path(value)


def check_kind(value: Any, kinds: type | UnionType, call: str, what: str, example: str) -> None:
    """RequestError for a value of another class. `what` it should be, and how it is written: the `example`."""
    if not isinstance(value, kinds):
        raise RequestError(f"{call.format(repr(value))}: {_say(value)} is no {what}", call.format(example))


def check_choice(value: Any, known: Sequence[str], call: str) -> None:
    """RequestError for none of these words."""
    if value not in known:
        raise RequestError(f"{call.format(repr(value))}: there is no such one", f"one of {', '.join(known)}")


def read_one_or_more(value: Any, call: str, example: str) -> tuple[str, ...]:
    """A name, or several."""
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, Sequence | Set) or not all(isinstance(name, str) for name in names):
        raise RequestError(f"{call.format(repr(value))}: {_say(value)} is no list of names", call.format(example))
    return tuple(names)


def _say(value: Any) -> str:
    return repr(value) if isinstance(value, int | float | None) else f"{value!r}, a {type(value).__name__},"
