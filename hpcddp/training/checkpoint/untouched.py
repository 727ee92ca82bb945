"""Whether what a resumed attempt loaded is still there when its loop begins.

A script that loads pretrained weights after rt.prepare is right in the first attempt. In each one that follows it
would undo all training so far, and nothing else would show it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpcddp.errors import RequestError
from hpcddp.training.marks import sum_bits
from hpcddp.training.parallel.sameness import is_whole


class _Loaded(NamedTuple):
    """A tensor as the checkpoint gave it."""

    thing: str  # the object's name in the checkpoint
    what: str
    tensor: Tensor
    dtype: torch.dtype
    sum: int


class LoadedState:
    """The numbers of all parameters, and of the optimizers' state, right after they were loaded.

    Buffers are left out: a forward pass may move them. So are learning rates, which a script may set by hand.
    """

    def __init__(self, objects: Mapping[str, Any], step: int) -> None:
        self._step = step
        self._optimizers = {name: thing for name, thing in objects.items() if isinstance(thing, Optimizer)}
        models = {name: thing for name, thing in objects.items() if isinstance(thing, nn.Module)}
        self._weights = [
            _Loaded(name, f"{path} of {type(model).__name__}", tensor, tensor.dtype, _sum(tensor))
            for name, model in models.items()
            for path, parameter in model.named_parameters()
            for tensor in _list_whole(parameter)
        ]
        self._state = {name: _sum_state(optimizer) for name, optimizer in self._optimizers.items()}

    def check(self) -> None:
        """RequestError if any of it has other numbers by now. A parameter of another type is not compared."""
        for one in self._weights:
            if one.tensor.dtype == one.dtype and _sum(one.tensor) != one.sum:
                raise RequestError(
                    f"the weights of {one.thing} were resumed from step {self._step} and then changed before the first"
                    f" step: {one.what} has other numbers than the checkpoint",
                    "load pretrained weights before rt.prepare, or under `if rt.steps == 0:`",
                )
        for name, optimizer in self._optimizers.items():
            if _sum_state(optimizer) != self._state[name]:
                raise RequestError(
                    f"the state of {name} was resumed from step {self._step} and then changed before the first step:"
                    f" this {type(optimizer).__name__} has other numbers than the checkpoint",
                    f"load the state of {name} before rt.prepare, or under `if rt.steps == 0:`",
                )


def _sum_state(optimizer: Optimizer) -> list[tuple[torch.dtype, int]]:
    """In the order of the parameters and of the names: loading makes new tensors."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = [optimizer.state[parameter] for parameter in parameters if parameter in optimizer.state]
    tensors = (state[name] for state in states for name in sorted(state) if isinstance(state[name], Tensor))
    return [(whole.dtype, _sum(whole)) for tensor in tensors for whole in _list_whole(tensor)]


def _list_whole(tensor: Tensor) -> Iterator[Tensor]:
    """This rank's numbers, which its tensor shares; none for what has no plain ones."""
    mine: Tensor = getattr(tensor, "to_local", lambda: tensor)()
    if is_whole(mine):
        yield mine


def _sum(tensor: Tensor) -> int:
    return int(sum_bits(tensor.detach()))
