"""`Record`: `typing.NamedTuple` for a package that starts once per rank, thousands at a time.

Importing `typing` costs 5 ms of CPU time, half of what starting Python does; `dataclasses` costs 16 ms, and each call
of `collections.namedtuple` 0.2 ms, because it compiles source text. A type checker sees the real NamedTuple here.
"""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers take this name for true, wherever it comes from

if TYPE_CHECKING:
    from typing import NamedTuple as Record
else:
    from collections import _tuplegetter  # what the fields of named tuples are, and no property

    def _new(cls, *values, **named):
        """All fields by place, as usual; else each by place, by name, or by its default."""
        if named or len(values) != len(cls._fields):
            values = _complete(cls, values, named)
        return tuple.__new__(cls, values)

    def _complete(cls, values, named):
        fields = cls._fields
        by_place = dict(zip(fields, values, strict=False))
        wrong = [name for name in named if name in by_place or name not in fields]
        found = {**cls._field_defaults, **by_place, **named}
        missing = [name for name in fields if name not in found]
        if wrong or missing or len(values) > len(fields):
            raise TypeError(f"{cls.__name__}({', '.join(fields)}): missing: {missing}, unknown: {wrong}")
        return map(found.__getitem__, fields)

    def _replace(self, **changed):
        return type(self)(**{**self._asdict(), **changed})

    def _asdict(self):
        return dict(zip(self._fields, self, strict=True))

    def _repr(self):
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self._asdict().items())})"

    _METHODS = {
        "__slots__": (),
        "__new__": _new,
        "__repr__": _repr,
        "__getnewargs__": lambda self: tuple(self),
        "_replace": _replace,
        "_asdict": _asdict,
        "_make": classmethod(lambda cls, values: cls(*values)),
    }

    class _Fields(type):
        """Turns the annotated names of a class body into a tuple's fields, as typing.NamedTuple does."""

        def __new__(cls, name, bases, body):
            if not bases:
                return super().__new__(cls, name, bases, body)
            kinds = body.pop("__annotations__", {})
            fields = tuple(kinds)
            defaults = {field: body.pop(field) for field in fields if field in body}
            getters = {field: _tuplegetter(at, None) for at, field in enumerate(fields)}
            shown = {"_fields": fields, "_field_defaults": defaults, "__match_args__": fields}
            shown["__annotations__"] = kinds
            return type(name, (tuple,), {**_METHODS, **shown, **getters, **body})

    class Record(metaclass=_Fields):
        """A base whose subclasses are named tuples."""


__all__ = ["TYPE_CHECKING", "Record"]
