"""What a loss says of how it was made: whether it is a sum, or a mean over so many parts.

A loss of several terms is followed down through additions and multiplications by a number, to functions of torch's own.
"""

from __future__ import annotations

from typing import Any

from hpcddp.training.torch_graph import MEAN, SUM, read_factor, read_reduction

_MOST = 64  # nodes that are looked at
_ADDS = ("AddBackward", "SubBackward", "NegBackward")
_MEANS = ("DivBackward", "MeanBackward")


def is_summed(made_by: Any, samples: int) -> bool:
    """Whether the node of the graph that made this loss, or one of the terms it adds, is a function of torch's own that
    has summed over a micro batch of so many samples. Not so if a term is a mean, also one by hand: a sum beside a mean
    may be one over weights."""
    left = [made_by]
    found = False
    for _ in range(_MOST):
        if not left:
            break
        node = left.pop()
        reduction, name = read_reduction(node), type(node).__name__
        found |= reduction == SUM
        if reduction == MEAN or name.startswith(_MEANS):
            return False
        below = [lower for lower, _ in getattr(node, "next_functions", ()) if lower is not None]
        if name.startswith(_ADDS):
            left += below
        elif name.startswith("MulBackward") and len(below) == 1:
            factor = read_factor(node)
            if factor is None or _divides(factor, samples):
                return False
            left += below
    return found


def _divides(factor: float, samples: int) -> bool:
    """Whether to multiply by it is to divide by the samples, or by the parts of all samples."""
    parts = 1 / factor / samples if factor else 0.0
    return parts > 0.5 and abs(parts - round(parts)) < 1e-4 * parts
