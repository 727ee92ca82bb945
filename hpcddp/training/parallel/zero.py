"""Changed steps of an optimizer: ZeRO-1, and whole parameters in exact mode with shards.

torch's ZeroRedundancyOptimizer would be another object than the script's optimizer, which its scheduler, its gradient
scaler and the loop hold already: here it stays the script's own, and torch's hooks around its step do the rest. The
weights are those of DDP, bit for bit, if the step of one parameter takes nothing from the others.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from hpcddp.errors import RequestError
from hpcddp.training.collectives import as_bytes
from hpcddp.training.parallel.layout import Layout
from hpcddp.training.parallel.tensor import replicate
from hpcddp.training.torch_compat import bare_step

_DDP = 'hpcddp.runtime(parallel="ddp")'


class _ChangedSteps:
    """Around an optimizer's step, of which `super().step()` is a part: the groups have other parameters in it."""

    def __init__(self, optimizer: Optimizer) -> None:
        if isinstance(optimizer, LBFGS):
            raise RequestError(
                "zero1, and exact mode in shards, step one parameter at a time, and this LBFGS steps all parameters"
                " together",
                f"torch.optim.AdamW or another one that steps each parameter by itself, or {_DDP}",
            )
        self._optimizer = optimizer
        self._whole: list[list[Any]] = []  # the groups' parameters, while they have others
        self._depth = 0  # of steps, one in the other

    def hook(self, until_end: ExitStack) -> None:
        """Install the hooks that make each step the changed one (collective)."""
        until_end.callback(self._optimizer.register_step_pre_hook(self._start_step).remove)
        until_end.callback(self._optimizer.register_step_post_hook(self._end_step).remove)
        until_end.callback(self._put_back)

    def _start_step(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(map(callable, (*args[1:], *kwargs.values()))):
            raise RequestError(
                "zero1, and exact mode in shards, take no closure: this optimizer has a part of the parameters then",
                f"optimizer.step() behind rt.backward(loss), or {_DDP}",
            )
        self._depth += 1
        if self._depth == 1:
            self._whole = [group["params"] for group in self._optimizer.param_groups]
            self._start(args[1:], kwargs)

    def _end_step(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._put_back()
            self._end()

    def _put_back(self) -> None:
        for group, parameters in zip(self._optimizer.param_groups, self._whole, strict=False):
            group["params"] = parameters
        self._whole = []

    def _start(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        """The step is over, and the groups have their parameters again."""


class ZeroSteps(_ChangedSteps):
    """ZeRO-1: each rank has the whole model, and the optimizer's state of the parameters that it owns.

    After DDP has averaged the gradients, each data rank steps its own parameters, and all get the new numbers of those.
    """

    def __init__(self, optimizer: Optimizer, layout: Layout, device: torch.device) -> None:
        super().__init__(optimizer)
        self.layout = layout
        self.device = device
        self._owners: dict[int, int] = {}  # by the parameter's id
        self._load = [0] * layout.data_size  # numbers that each data rank owns
        self._share_out()
        for parameter in [*optimizer.state]:  # of a state that the script has loaded
            if isinstance(parameter, Tensor) and not self._is_mine(parameter):
                del optimizer.state[parameter]

    def _share_out(self) -> None:
        """Give each parameter without an owner one, the same on all ranks: the largest first, to who has the least. A
        group may be added later."""
        new = [parameter for parameter in self._list() if id(parameter) not in self._owners]
        for parameter in sorted(new, key=Tensor.numel, reverse=True):
            owner = self._owners[id(parameter)] = self._load.index(min(self._load))
            self._load[owner] += parameter.numel()

    def list_owners(self) -> list[int]:
        """The data rank of each parameter, in the order that `state_dict()` counts them in."""
        self._share_out()
        return [self._owners[id(parameter)] for parameter in self._list()]

    def _start(self, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        self._share_out()
        for group in self._optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if self._is_mine(parameter)]

    @torch.no_grad()
    def _end(self) -> None:
        """Give all ranks the new numbers of each rank's parameters."""
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


class WholeSteps(_ChangedSteps):
    """Exact mode with shards: step one whole parameter at a time, as if no rank held a shard. Between steps the
    optimizer holds shards only."""

    def _start(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Step each parameter by itself, whole. Torch's own step, behind it, then has nothing to step."""
        groups = self._optimizer.param_groups
        for group in groups:
            group["params"] = []
        for group, parameters in zip(groups, self._whole, strict=True):
            for parameter in parameters:
                if parameter.grad is not None:
                    self._step_one(parameter, group, args, kwargs)
            group["params"] = []

    def _step_one(self, parameter: Any, group: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        step = bare_step(type(self._optimizer))
        if not hasattr(parameter, "device_mesh"):
            group["params"] = [parameter]
            step(self._optimizer, *args, **kwargs)
            return
        states = self._optimizer.state
        whole = nn.Parameter(_gather(parameter.detach()))
        whole.grad = _gather(parameter.grad)
        if parameter in states:
            states[whole] = {name: _gather(value) for name, value in states.pop(parameter).items()}
        group["params"] = [whole]
        step(self._optimizer, *args, **kwargs)
        with torch.no_grad():
            parameter.copy_(_cut_like(whole.detach(), parameter))
        if whole in states:
            states[parameter] = {name: _cut_like(value, parameter) for name, value in states.pop(whole).items()}


def _gather(value: Any) -> Any:
    """A DTensor as a plain tensor, whole; all else as it is. A collective where it is in shards."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _cut_like(value: Any, parameter: Any) -> Any:
    """This rank's shard of what is as large as its parameter, in memory of its own; all else as it is."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    return replicate(value, parameter.device_mesh).redistribute(placements=parameter.placements).clone()
