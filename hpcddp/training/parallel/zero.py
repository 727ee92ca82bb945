"""ZeRO-1: each rank has the whole model, and the optimizer's state of the parameters that it owns.

After DDP has averaged the gradients, each data rank steps its own parameters, and all get the new numbers of those.
torch's ZeroRedundancyOptimizer would be another object than the script's optimizer, which its scheduler, its gradient
scaler and the loop hold already: here it stays the script's own. An optimizer whose step of a parameter takes something
from another one is refused, so that the weights are those of DDP, bit for bit.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from hpcddp.errors import RequestError
from hpcddp.training.parallel.layout import Layout
from hpcddp.training.parallel.spread import as_bytes
from hpcddp.training.parallel.tensor import replicate
from hpcddp.training.torch_compat import NoCollectives, bare_step, is_hooks

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


# An optimizer's step on a sharded model, one whole parameter at a time, with the result of a step on whole ones.


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


# Optimizers that have not stepped, and get other parameters in place of those that they were made with.


def is_fresh(optimizer: Optimizer) -> bool:
    """Whether it has made no step: no state, or tensors like the parameters that are all one number."""
    return all(
        isinstance(state, dict)  # some keep a number there that is of no parameter
        and float(state.get("step", -1)) == 0.0
        and all(_is_one_number(value) for value in state.values())
        for state in optimizer.state.values()
    )


def replace_parameters(optimizer: Optimizer, others: Mapping[int, nn.Parameter]) -> None:
    """Give a fresh optimizer `others`, by the id of the parameter whose place each takes."""
    for group in optimizer.param_groups:  # in place: torch's LBFGS, and wrappers, share the list
        group["params"][:] = [others.get(id(p), p) for p in group["params"]]
    for before in [*optimizer.state]:
        after = others.get(id(before))
        if after is not None:
            state = optimizer.state.pop(before)
            optimizer.state[after] = {name: _like(after, before, value) for name, value in state.items()}


def _is_one_number(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.numel() < 2 or bool((value == value.flatten()[0]).all())


def _like(after: Tensor, before: Tensor, value: Any) -> Any:
    if not isinstance(value, Tensor) or value.shape != before.shape or not value.numel():
        return value
    return torch.full_like(after.detach(), value.flatten()[0].item(), dtype=value.dtype)


# Whether an optimizer's step of one parameter takes something from the others, such as a norm over all gradients.
#
# A rank that steps a part of the parameters would then take another step than one that has them all. A copy of the
# optimizer tries it, with two small parameters in place of its own: the first has to move alike with and without the
# second.


#: What the refusals say of such an optimizer.
TOGETHER = "steps all parameters together, as by a norm or a mean over them"

_LARGEST = 4  # rows and columns of the small parameters
_SCALES = (1.0, 1e-3)  # of their gradients: a bound on a norm, or on a step, acts in one of both
_STEPS = 4  # the first of some does nothing yet
_GROUPS = 16  # that are tried; others have the same class
_LEAST = 1e-6  # of the way that the parameter goes


def steps_together(optimizer: Optimizer) -> bool:
    """Of torch's own optimizers only LBFGS; another one is tried. False for one that cannot be copied or tried, as its
    step may need more than parameters and gradients. The same on all ranks that have the same parameters."""
    if type(optimizer).__module__.startswith("torch.optim"):
        return isinstance(optimizer, LBFGS)
    if isinstance(optimizer, LBFGS):
        return True
    try:
        with _undisturbed():
            return any(
                _differs(optimizer, nth, scale)
                for nth, group in enumerate(optimizer.param_groups[:_GROUPS])
                if any(_takes(parameter) for parameter in group["params"])
                for scale in _SCALES
            )
    except Exception:  # the script's own code: what it needs is not known
        return False


def _differs(optimizer: Optimizer, nth: int, scale: float) -> bool:
    """Whether the first parameter of this group moves otherwise if the second one is there."""
    alone, together = (_move(optimizer, nth, scale, has_second=second) for second in (False, True))
    start = _make_numbers(alone)
    rounding = 16 * torch.finfo(alone.dtype).eps * float(start.abs().max())
    return float((alone - together).abs().max()) > rounding + _LEAST * float((alone - start).abs().max())


def _move(optimizer: Optimizer, nth: int, scale: float, *, has_second: bool) -> Tensor:
    """The first small parameter after some steps."""
    clone, first, second = _copy(optimizer, nth)
    clone.param_groups[nth]["params"] = [first, second] if has_second else [first]
    step = bare_step(type(optimizer))
    for _ in range(_STEPS):
        random.seed(0)
        torch.manual_seed(0)
        for times, parameter in zip((1, 5), clone.param_groups[nth]["params"], strict=False):
            parameter.grad = scale * times * (2 + _make_numbers(parameter))
        step(clone)
    return first.detach()


def _copy(optimizer: Optimizer, nth: int) -> tuple[Optimizer, nn.Parameter, nn.Parameter]:
    """A copy of all but the parameters and their states; of one group's two smallest a small one each."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    fitting = [parameter for parameter in optimizer.param_groups[nth]["params"] if _takes(parameter)]
    smallest = sorted(fitting, key=Tensor.numel)[:2]
    smallest.sort(key=lambda parameter: [p is parameter for p in fitting].index(True))  # as the step takes them
    small = [_make_small(parameter) for parameter in smallest]
    nothing = nn.Parameter(torch.empty(0), requires_grad=False)
    memo: dict[int, Any] = {id(parameter): nothing for parameter in held}
    memo |= {id(parameter): new for parameter, new in zip(smallest, small, strict=True)}
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    copies = [{**copy.deepcopy(group, memo), "params": []} for group in groups]
    for group in copies:
        if "lr" in group and not group["lr"]:  # of a warm-up that begins with 0
            group["lr"] = 1e-2
    state: Any = defaultdict(dict)
    for parameter, new in zip(smallest, small, strict=True):
        if parameter in optimizer.state:
            state[new] = {name: _shrink(value, parameter, new) for name, value in optimizer.state[parameter].items()}
    memo |= {id(group): new for group, new in zip(optimizer.param_groups, copies, strict=True)}
    memo |= {id(optimizer.param_groups): copies, id(optimizer.state): state}
    return _clone(optimizer, memo), small[0], small[1] if len(small) > 1 else _make_small(small[0])


def _clone(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """With its attributes and those of another one that it steps inside, which torch's own copy leaves out."""
    clone: Optimizer = object.__new__(type(optimizer))
    memo[id(optimizer)] = clone
    for inner in vars(optimizer).values():
        if isinstance(inner, Optimizer) and id(inner) not in memo:
            _clone(inner, memo)
    for name, value in vars(optimizer).items():
        if is_hooks(name):
            vars(clone)[name] = OrderedDict()
        elif not callable(getattr(type(optimizer), name, None)):  # else it is in place of a method
            vars(clone)[name] = copy.deepcopy(value, memo)
    return clone


def _takes(parameter: Tensor) -> bool:
    return parameter.is_floating_point() and parameter.numel() > 0 and parameter.requires_grad


def _make_small(parameter: Tensor) -> nn.Parameter:
    """In double precision, where rounding hides nothing."""
    sizes = [min(size, _LARGEST) for size in parameter.shape]
    return nn.Parameter(_make_numbers(torch.empty(sizes, dtype=torch.float64, device=parameter.device)))


def _make_numbers(like: Tensor) -> Tensor:
    """From -1 to 1, none of them 0."""
    return torch.linspace(-1, 1, like.numel(), dtype=like.dtype, device=like.device).reshape(like.shape) + 1e-2


def _shrink(value: Any, parameter: Tensor, new: Tensor) -> Any:
    """What `__init__` has made for a parameter, for the small one."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return copy.deepcopy(value)
    if hasattr(value, "device_mesh"):  # to gather it takes all ranks
        return torch.zeros_like(new)
    part = value.detach()[tuple(slice(size) for size in new.shape)].clone()
    return part.to(new.dtype) if part.is_floating_point() else part


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Nothing of a trial is seen: no warnings, no random numbers that are missing later; no exchange among ranks."""
    generators = random.getstate()
    with warnings.catch_warnings(), torch.random.fork_rng(), NoCollectives():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            random.setstate(generators)
