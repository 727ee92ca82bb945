"""Another method in place of one of torch's, of one instance only."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any


def replace(thing: Any, name: str, method: Callable[..., Any]) -> Callable[[], None]:
    """The instance's method `name` becomes `method(original, ...)`; it stays a method, which schedulers wrap again.

    Returns what undoes that. Where something has wrapped the method since, it stays, and calls the original alone.
    """
    original, former = getattr(thing, name), vars(thing).get(name)
    is_undone = False

    @functools.wraps(original)
    def replaced(_self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if is_undone else method(original, *args, **kwargs)

    bound = MethodType(replaced, thing)
    setattr(thing, name, bound)

    def undo() -> None:
        nonlocal is_undone
        is_undone = True
        if vars(thing).get(name) is not bound:
            return
        if former is None:
            delattr(thing, name)
        else:
            setattr(thing, name, former)

    return undo


def replace_in_class(thing: Any, name: str, method: Callable[..., Any]) -> Callable[[], None]:
    """The same by a class of its own with the same name, where all that the instance holds is its state.

    Pickled and copied, it is of its former class: no module has the new one.
    """
    cls = type(thing)
    original = getattr(cls, name)
    is_undone = False

    @functools.wraps(original)
    def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = functools.partial(original, self)
        return bound(*args, **kwargs) if is_undone else method(bound, *args, **kwargs)

    former = getattr(cls, "_former_class", cls)

    def reduce(self: Any, _protocol: int) -> Any:
        made: Any = object.__reduce_ex__(self, 1)  # later protocols insist on the object's class
        function, arguments, *state = made
        return function, tuple(former if part is type(self) else part for part in arguments), *state

    methods = {name: replaced, "_former_class": former, "__module__": cls.__module__}
    if (former.__reduce_ex__, former.__reduce__) == (object.__reduce_ex__, object.__reduce__):  # no way of its own
        methods["__reduce_ex__"] = reduce
    made_class = type(cls.__name__, (cls,), methods)
    thing.__class__ = made_class

    def undo() -> None:
        nonlocal is_undone
        is_undone = True
        if type(thing) is made_class:
            thing.__class__ = cls

    return undo
