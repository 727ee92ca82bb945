"""A parameter's gradient at one moment, to see later what became of it.

No number of it is read, so this costs nothing: a gradient's version changes with each change in place.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from hpcddp.training.torch_compat import version_of


class Mark:
    """The gradient that a parameter has now, if any, and its version."""

    __slots__ = ("_gradient", "_version", "parameter")

    def __init__(self, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        self.parameter = parameter
        self._gradient = gradient  # itself, not its id, which another one may get
        self._version = 0 if gradient is None else version_of(gradient)

    def holds(self) -> bool:
        """Whether the parameter has this gradient still, unchanged."""
        gradient = self._gradient
        return self.parameter.grad is gradient and (gradient is None or version_of(gradient) == self._version)

    def was_changed(self) -> bool:
        """Whether the parameter has no gradient any more, or this one was changed in place.

        Another tensor is no change: DDP puts one there when it lays its buckets out anew.
        """
        gradient = self._gradient
        return gradient is not None and (self.parameter.grad is None or version_of(gradient) != self._version)


def mark_first(parameters: Iterable[nn.Parameter]) -> Mark | None:
    """Of the first parameter that has a gradient; None if there is none."""
    for parameter in parameters:
        if parameter.grad is not None:
            return Mark(parameter)
    return None
