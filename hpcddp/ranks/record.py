"""`Record`: `typing.NamedTuple` for a package that starts once per rank, thousands at a time.

Importing `typing` costs 5 ms of CPU time, half of what starting Python does; `dataclasses` costs 16 ms. A type checker
sees the real NamedTuple here; at run time `collections.namedtuple`, which `argparse` loads anyway, does it.
"""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers take this name for true, wherever it comes from

if TYPE_CHECKING:
    from typing import NamedTuple as Record
else:
    from collections import namedtuple

    class _Fields(type):
        """Turns the annotated names of a class body into a named tuple's fields, as typing.NamedTuple does."""

        def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, object]) -> type:
            if not bases:
                return super().__new__(cls, name, bases, body)
            fields = list(body.pop("__annotations__"))
            defaults = [body.pop(field) for field in fields if field in body]
            made = namedtuple(name, fields, defaults=defaults, module=body["__module__"])  # see above
            for key, value in body.items():
                setattr(made, key, value)
            return made

    class Record(metaclass=_Fields):
        """A base whose subclasses are named tuples."""


__all__ = ["TYPE_CHECKING", "Record"]
