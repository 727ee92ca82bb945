"""Another method in place of one of torch's, of one instance only."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any


def replace(thing: Any, name: str, method: Callable[..., Any]) -> None:
    """The instance's method `name` becomes `method(original, ...)`; it stays a method, which schedulers wrap again."""
    original = getattr(thing, name)

    @functools.wraps(original)
    def replaced(_self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(original, *args, **kwargs)

    setattr(thing, name, MethodType(replaced, thing))


def replace_in_class(thing: Any, name: str, method: Callable[..., Any]) -> None:
    """The same by a class of its own with the same name, where all that the instance holds is its state."""
    cls = type(thing)
    original = getattr(cls, name)

    @functools.wraps(original)
    def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(functools.partial(original, self), *args, **kwargs)

    thing.__class__ = type(cls.__name__, (cls,), {name: replaced, "__module__": cls.__module__})
