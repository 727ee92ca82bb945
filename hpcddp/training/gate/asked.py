"""Steps that were asked for in a micro batch before the last, and have to be asked for in the last one too."""

from __future__ import annotations

from typing import NamedTuple

from hpcddp.errors import RequestError


class _Call(NamedTuple):
    text: str
    is_optimizer: bool


class AskedSteps:
    """What was asked to act in this global batch, by the objects' ids: too early, and at a last micro batch."""

    def __init__(self) -> None:
        self._early: dict[int, _Call] = {}
        self._acted: set[int] = set()

    def start(self) -> None:
        """A global batch begins."""
        self._early.clear()
        self._acted.clear()

    def note_early(self, thing: object, method: str, *, is_optimizer: bool = False) -> None:
        """The thing's method was called before the last micro batch, where it does nothing."""
        self._early[id(thing)] = _Call(f"{type(thing).__name__}.{method}()", is_optimizer)

    def note_acted(self, thing: object) -> None:
        """It was called in the last one, or left out on purpose."""
        self._acted.add(id(thing))

    def check(self, *, optimizers_only: bool) -> None:
        """The global batch is over. RequestError for a call that was made, and never where it does something."""
        for thing, call in self._early.items():
            if thing not in self._acted and (call.is_optimizer or not optimizers_only):
                raise RequestError(
                    f"{call.text} was called in some micro batches of a global batch and not in the last one: only"
                    " there it does something",
                    "without a condition it acts once per global batch; every third time: if rt.steps % 3 == 0: …, in"
                    " place of a count of the loader's batches",
                )
