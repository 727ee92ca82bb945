"""A parameter's gradient at one moment, to see later what became of it.

No number of it is read, so a mark costs nothing: a gradient's version changes with each change in place. Only what
`p.grad.data` changes it does not tell, for which `sum_bits` is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from hpcddp.training.torch_compat import version_of

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SPREAD = 16  # parameters of an optimizer that are marked: a mark costs about 1 µs


class Mark:
    """The gradient that a parameter has now, if any, and its version. It does not keep the gradient's memory alive."""

    __slots__ = ("_gradient", "_place", "_version", "parameter")

    def __init__(self, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        self.parameter = parameter
        # no id, which another one may get
        self._gradient = None if gradient is None else TensorWeakRef(gradient)
        self._version = 0 if gradient is None else version_of(gradient)
        self._place = gradient.data_ptr() if type(gradient) is Tensor and not gradient.is_sparse else 0

    def holds(self) -> bool:
        """Whether the parameter has this gradient still, unchanged."""
        gradient, marked = self.parameter.grad, self._gradient
        if gradient is None or marked is None:
            return gradient is None and marked is None
        return marked() is gradient and version_of(gradient) == self._version

    def was_moved(self) -> bool:
        """Whether this gradient has other memory now, as `p.grad.data = …` gives it."""
        gradient, marked = self.parameter.grad, self._gradient
        if gradient is None or marked is None or marked() is not gradient or not self._place:
            return False
        return gradient.data_ptr() != self._place

    def is_there(self) -> bool:
        """Whether the parameter has this gradient still, perhaps changed in place, and it is not all zeros."""
        gradient, marked = self.parameter.grad, self._gradient
        if gradient is None or marked is None or marked() is not gradient:
            return False
        return bool((gradient.coalesce().values() if gradient.is_sparse else gradient).any())

    def was_changed(self) -> bool:
        """Whether the parameter has no gradient any more, or this one was changed in place.

        Another tensor is no change: DDP puts one there when it lays its buckets out anew.
        """
        gradient, marked = self.parameter.grad, self._gradient
        if gradient is None or marked is None:
            return marked is not None
        return marked() is gradient and version_of(gradient) != self._version


def spread(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Up to `SPREAD` of them, evenly over the sequence, with the first and the last."""
    if len(parameters) <= SPREAD:
        return list(parameters)
    return [parameters[nth * (len(parameters) - 1) // (SPREAD - 1)] for nth in range(SPREAD)]


def mark_all(parameters: Iterable[nn.Parameter]) -> list[Mark]:
    """Of those that have a gradient."""
    return [Mark(parameter) for parameter in parameters if parameter.grad is not None]


def sum_bits(tensor: Tensor) -> Tensor:
    """A whole number that any other numbers would change; the order of the sum does not. Complex ones count as real."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.detach().view(INTEGERS[real.element_size()]).sum(dtype=torch.int64)
