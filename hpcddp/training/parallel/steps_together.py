"""Whether an optimizer's step of one parameter takes something from the others, such as a norm over all gradients.

A rank that steps a part of the parameters would then take another step than one that has them all. It is tried on a
copy of the optimizer that holds small parameters, with numbers of our own, in place of two of its parameters: the first
has to move alike with and without the second.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from hpcddp.training.torch_compat import NoCollectives, bare_step, is_hooks

#: What the refusals say of such an optimizer.
TOGETHER = "steps all parameters together, as by a norm or a mean over them"

_LARGEST = 4  # rows and columns of the small parameters
_SCALES = (1.0, 1e-3)  # of their gradients: a bound on a norm, or on a step, acts in one of both
_STEPS = 4  # the first of some does nothing yet
_GROUPS = 16  # that are tried; others have the same class
_LEAST = 1e-6  # of the way that the parameter goes


def steps_together(optimizer: Optimizer, method: str = "step") -> bool:
    """Of torch's own optimizers only LBFGS; another one is tried. False for one that cannot be copied or tried, as its
    step may need more than parameters and gradients. The same on all ranks that have the same parameters.

    `method`: another one that moves the parameters, such as the `first_step` of SAM, which not all optimizers have.
    """
    if type(optimizer).__module__.startswith("torch.optim"):
        return isinstance(optimizer, LBFGS)
    if isinstance(optimizer, LBFGS):
        return True
    try:
        with _undisturbed():
            return any(
                _differs(optimizer, nth, scale, method)
                for nth, group in enumerate(optimizer.param_groups[:_GROUPS])
                if any(_takes(parameter) for parameter in group["params"])
                for scale in _SCALES
            )
    except Exception:  # the script's own code: what it needs is not known
        return False


def _differs(optimizer: Optimizer, nth: int, scale: float, method: str) -> bool:
    """Whether the first parameter of this group moves otherwise if the second one is there."""
    alone, beside = (_move(optimizer, nth, scale, method, has_second=second) for second in (False, True))
    start = _make_numbers(alone)
    rounding = 16 * torch.finfo(alone.dtype).eps * float(start.abs().max())
    return float((alone - beside).abs().max()) > rounding + _LEAST * float((alone - start).abs().max())


def _move(optimizer: Optimizer, nth: int, scale: float, method: str, *, has_second: bool) -> Tensor:
    """The first small parameter after some steps."""
    clone, first, second = _copy(optimizer, nth)
    clone.param_groups[nth]["params"] = [first, second] if has_second else [first]
    step = bare_step(type(optimizer)) if method == "step" else getattr(type(optimizer), method)
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
