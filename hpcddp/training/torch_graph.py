"""What is private to torch about gradients: the graph of a loss, the backward pass, changes in place.

As in `torch_compat.py` each has a test, run with the supported versions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

__all__ = ["Node"]

MEAN, SUM = 1, 2  # how `reduction="mean"` and "sum" are called where a loss is computed


def version_of(tensor: Tensor) -> int:
    """A number that each change in place raises."""
    return tensor._version


@contextmanager
def around_backward(around: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Meanwhile each backward pass, by `loss.backward()` too, runs inside of what `around` gives. Torch has no hook for
    it: `Tensor.backward` calls this function of its module."""
    original, is_over = torch.autograd.backward, False

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> None:
        with nullcontext() if is_over else around():
            original(*args, **kwargs)

    torch.autograd.backward = backward
    try:
        yield
    finally:
        is_over = True
        if torch.autograd.backward is backward:
            torch.autograd.backward = original


def read_reduction(made_by: Any) -> int | None:
    """How the function of torch's own whose node in the graph this is reduced its loss. None: it is no such function,
    or does not say."""
    return getattr(made_by, "_saved_reduction", None)


def read_factor(made_by: Any) -> float | None:
    """The number that a multiplication's node in the graph multiplied by, if that was one number."""
    factor = getattr(made_by, "_saved_other", None)
    return float(factor) if isinstance(factor, Tensor) and factor.numel() == 1 else None


def read_counted(made_by: Any) -> float | None:
    """Of a cross entropy that is a mean the sum of the weights that it was divided by: parts that are not ignored, by
    their class weights. None where that is not known."""
    counted = getattr(made_by, "_saved_total_weight", None)
    return None if counted is None else float(counted)


def has_gradient_hook(parameter: nn.Parameter) -> bool:
    """Whether something is called with this parameter's gradient in the backward pass."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def list_inputs(node: Node) -> list[Node]:
    """The nodes of the graph whose results this one takes."""
    return [earlier for earlier, _ in node.next_functions if earlier is not None]


def leaf_of(node: Node) -> Tensor | None:
    """The tensor that requires a gradient itself, such as a parameter, if the node stands for one."""
    return getattr(node, "variable", None)


def is_single(node: Node) -> bool:
    """Whether its result is one number."""
    results: Any = getattr(node, "_input_metadata", ())  # the gradients that it gets have the result's shape
    return len(results) == 1 and all(size == 1 for size in results[0].shape)
