"""Whether the loop multiplies the gradients by the same factor on each rank, where a rank has a part of the model.

Clipping by hand takes a norm of the gradients, and on such a rank that is often a norm of its part: each rank clips by
another factor, without an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from hpcddp.errors import RequestError

_STEPS = 2  # of an attempt, which are looked at; the ranks compare in the one behind them
_SAME = 1e-4  # relative: rounding of one factor
_OTHER = 1e-3  # relative: what two ranks' factors change against each other


class FactorsAlike:
    """Measures how the gradients' norms change between the backward pass and the optimizer's step."""

    def __init__(self) -> None:
        self._before: dict[int, float] = {}  # by the parameter's id
        self._now: list[float] | None = None  # the factors of this step, once an optimizer steps
        self._seen: list[float | None] = []  # the one factor of each step
        self._checks = 0

    def watch(self, optimizers: Iterable[Optimizer]) -> list[Any]:
        """Returns the handles of hooks, to `remove()` them."""
        return [optimizer.register_step_pre_hook(self._look) for optimizer in optimizers]

    def note(self, parameters: Iterable[nn.Parameter]) -> None:
        """After the last backward pass of a step."""
        self._end_step()
        self._before = _measure(parameters) if self._checks <= _STEPS else {}

    def check(self) -> None:
        """Once in each step, before or after `note`. RequestError, on every rank, for factors that differ. A collective
        in the third step."""
        self._end_step()
        self._checks += 1
        if self._checks != _STEPS + 1:
            return
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, self._seen[-_STEPS:])
        whole = {rank: seen for rank, seen in enumerate(found) if len(seen) == _STEPS and None not in seen}
        for rank, seen in whole.items():
            first = min(whole)
            times = [mine / its for mine, its in zip(whole[first], seen, strict=True)]
            # what stays from step to step is the loop's own factor of some layers; that of two norms changes
            if _apart(*times):
                raise RequestError(
                    f"between the backward pass and the optimizer's step the loop multiplied the gradients of rank"
                    f" {first} by {whole[first][-1]:.3g} and those of rank {rank} by {seen[-1]:.3g}: it took a norm of"
                    " each rank's part of the model",
                    "rt.step(optimizer, clip_norm=1.0) or torch.nn.utils.clip_grad_norm_, which take the norm of all",
                )

    def _end_step(self) -> None:
        if self._now is not None and self._checks <= _STEPS:
            self._seen.append(_find_one(self._now))
        self._now = None

    def _look(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._now = [] if self._now is None else self._now
        if self._before:
            held = (parameter for group in optimizer.param_groups for parameter in group["params"])
            after = _measure(parameter for parameter in held if id(parameter) in self._before)
            self._now += [norm / self._before[number] for number, norm in after.items()]


def _measure(parameters: Iterable[nn.Parameter]) -> dict[int, float]:
    """The norm of this rank's part of each gradient that is not 0."""
    found: dict[int, float] = {}
    for parameter in parameters:
        gradient: Any = parameter.grad
        if gradient is None or gradient.layout is not torch.strided or gradient.element_size() < 4:
            continue
        local: Tensor = getattr(gradient, "to_local", lambda own=gradient: own)()
        norm = float(torch.linalg.vector_norm(local.detach().double())) if local.is_floating_point() else 0.0
        if norm > 0:
            found[id(parameter)] = norm
    return found


def _find_one(factors: list[float]) -> float | None:
    """The factor of all of them; None if there is not one, or one parameter only, which may have been meant."""
    if len(factors) < 2 or not min(factors) > 0:
        return None
    return factors[0] if max(factors) <= min(factors) * (1 + _SAME) else None


def _apart(one: float, other: float) -> bool:
    return abs(one - other) > _OTHER * max(one, other)
