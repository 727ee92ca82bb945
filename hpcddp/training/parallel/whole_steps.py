"""An optimizer's step on a sharded model, one whole parameter at a time, with the result of a step on whole ones.

A step on shards rounds otherwise: some kernels compute the last numbers of a tensor, which do not fill a vector
register, in another way (seen with fused AdamW, and with bf16 weights); and an optimizer may take norms of its tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpcddp.errors import RequestError
from hpcddp.training.parallel.steps_together import TOGETHER, steps_together
from hpcddp.training.parallel.tensor import replicate


class WholeSteps:
    """One optimizer. Between steps it holds shards only. RequestError for one that steps all parameters together."""

    def __init__(self, optimizer: Optimizer) -> None:
        if steps_together(optimizer):
            raise RequestError(
                "exact mode steps a sharded model one parameter at a time, and this"
                f" {type(optimizer).__name__} {TOGETHER}",
                "torch.optim.AdamW or another one that steps each parameter by itself, or"
                ' hpcddp.runtime(parallel="ddp")',
            )
        self._optimizer = optimizer

    def step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In place of `optimizer.step()`. A collective."""
        groups = self._optimizer.param_groups
        held = [group["params"] for group in groups]
        result = None
        try:
            for group in groups:
                group["params"] = []
            for group, parameters in zip(groups, held, strict=True):
                for parameter in parameters:
                    if parameter.grad is not None:
                        result = self._step_one(parameter, group, original, *args, **kwargs)
                group["params"] = []
        finally:
            for group, parameters in zip(groups, held, strict=True):
                group["params"] = parameters
        return result

    def _step_one(
        self, parameter: Any, group: dict[str, Any], original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if not hasattr(parameter, "device_mesh"):
            group["params"] = [parameter]
            return original(*args, **kwargs)
        states = self._optimizer.state
        whole = nn.Parameter(gather(parameter.detach()))
        whole.grad = gather(parameter.grad)
        if parameter in states:
            states[whole] = {name: gather(value) for name, value in states.pop(parameter).items()}
        group["params"] = [whole]
        result = original(*args, **kwargs)
        with torch.no_grad():
            parameter.copy_(cut_like(whole.detach(), parameter))
        if whole in states:
            states[parameter] = {name: cut_like(value, parameter) for name, value in states.pop(whole).items()}
        return result


def gather(value: Any) -> Any:
    """A DTensor as a plain tensor, whole; all else as it is. A collective where it is in shards."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def cut_like(value: Any, parameter: Any) -> Any:
    """This rank's shard of what is as large as its parameter, in memory of its own; all else as it is."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    return replicate(value, parameter.device_mesh).redistribute(placements=parameter.placements).clone()
