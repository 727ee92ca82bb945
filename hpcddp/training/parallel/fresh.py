"""Optimizers that have not stepped, and get other parameters in place of those that they were made with.

Most have no state before their first step. Adagrad makes it in its constructor: one number per tensor, and it moves
along.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def is_fresh(optimizer: Optimizer) -> bool:
    """Whether it has made no step: no state, or tensors like the parameters that are all one number."""
    return all(
        isinstance(state, dict)  # some keep a number there that is of no parameter
        and float(state.get("step", -1)) == 0.0
        and all(_is_one_number(value) for value in state.values())
        for state in optimizer.state.values()
    )


def replace_parameters(optimizer: Optimizer, others: Mapping[int, nn.Parameter], gone: Collection[int] = ()) -> None:
    """Give a fresh optimizer `others`, by the id of the parameter whose place each takes, and take `gone` from it.

    A parameter group may stay empty.
    """
    for group in optimizer.param_groups:  # in place: torch's LBFGS, and wrappers, share the list
        group["params"][:] = [others.get(id(p), p) for p in group["params"] if id(p) not in gone]
    for before in [*optimizer.state]:
        after, state = others.get(id(before)), optimizer.state[before]
        if after is not None or id(before) in gone:
            del optimizer.state[before]
        if after is not None:
            optimizer.state[after] = {name: _like(after, before, value) for name, value in state.items()}


def _is_one_number(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.numel() < 2 or bool((value == value.flatten()[0]).all())


def _like(after: Tensor, before: Tensor, value: Any) -> Any:
    if not isinstance(value, Tensor) or value.shape != before.shape or not value.numel():
        return value
    return torch.full_like(after.detach(), value.flatten()[0].item(), dtype=value.dtype)
