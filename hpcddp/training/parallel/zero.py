"""ZeRO-1: each rank has the whole model, and the optimizer's state of the parameters that it owns.

After DDP has averaged the gradients, each data rank steps its own parameters, and all get the new numbers of those.
torch's ZeroRedundancyOptimizer would be another object than the script's optimizer, which its scheduler, its gradient
scaler and the loop hold already: here it stays the script's own. An optimizer whose step of
a parameter takes something from another one is refused, so that the weights are those of DDP, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from hpcddp.errors import RequestError
from hpcddp.training.parallel.layout import Layout
from hpcddp.training.parallel.spread import as_bytes
from hpcddp.training.parallel.steps_together import TOGETHER, steps_together

_HINT = 'torch.optim.AdamW or another one that steps each parameter by itself, or hpcddp.runtime(parallel="ddp")'


class OwnSteps:
    """One optimizer whose parameters are shared out among the data ranks. RequestError for one that cannot be."""

    def __init__(self, optimizer: Optimizer, layout: Layout, device: torch.device) -> None:
        is_zero = hasattr(optimizer, "consolidate_state_dict")
        if is_zero or steps_together(optimizer):
            why = "is ZeRO already" if is_zero else TOGETHER
            raise RequestError(
                f"parallel zero1 shares out the steps of an optimizer, and {_name(optimizer)} {why}", _HINT
            )
        self._optimizer = optimizer
        self.layout = layout
        self.device = device
        self._owners: dict[int, int] = {}  # by the parameter's id
        self._load = [0] * layout.data_size  # numbers that each data rank owns
        self.share_out()
        for parameter in [*optimizer.state]:  # of a state that the script has loaded
            if isinstance(parameter, Tensor) and not self._is_mine(parameter):
                del optimizer.state[parameter]

    def share_out(self) -> None:
        """Give each parameter without an owner one, the same on all ranks: the largest first, to who has the least."""
        new = [parameter for parameter in self._list() if id(parameter) not in self._owners]
        for parameter in sorted(new, key=Tensor.numel, reverse=True):
            owner = self._load.index(min(self._load))
            self._owners[id(parameter)] = owner
            self._load[owner] += parameter.numel()

    def list_owners(self) -> list[int]:
        """The data rank of each parameter, in the order that `state_dict()` counts them in."""
        self.share_out()
        return [self._owners[id(parameter)] for parameter in self._list()]

    def step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In place of `optimizer.step()`: that of the own parameters, then everyone's new numbers. A collective."""
        self.share_out()
        groups = self._optimizer.param_groups
        whole = [group["params"] for group in groups]
        try:
            for group in groups:
                group["params"] = [parameter for parameter in group["params"] if self._is_mine(parameter)]
            result = original(*args, **kwargs)
        finally:
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = parameters
        self._exchange()
        return result

    @torch.no_grad()
    def _exchange(self) -> None:
        for owner, rank in enumerate(self.layout.data_ranks):
            theirs = [p for p in self._list() if self._owners[id(p)] == owner and p.requires_grad]
            if not theirs:
                continue
            flat = torch.cat([as_bytes(parameter.detach().contiguous()) for parameter in theirs])
            dist.broadcast(flat, src=rank, group=self.layout.data_group)
            if owner == self.layout.data_rank:
                continue
            at = 0
            for parameter in theirs:
                size = parameter.numel() * parameter.element_size()
                # a copy of the part: its bytes may begin where a number of this type must not
                parameter.copy_(flat[at : at + size].clone().view(parameter.dtype).view(parameter.shape))
                at += size

    def _list(self) -> list[Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _is_mine(self, parameter: Tensor) -> bool:
        return self._owners.get(id(parameter)) == self.layout.data_rank


def _name(optimizer: Optimizer) -> str:
    return f"this {type(optimizer).__name__}"
