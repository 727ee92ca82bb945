"""Where a model is cut into the stages of a pipeline, and what each stage keeps of it.

A stage has the modules from the one that it is named after to that of the next stage, in the order of
`model.named_modules()`. The model stays whole in its structure and its names; of the other stages' parameters a rank
keeps the shapes only (torch's device "meta"), which are no parameters any more.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpcddp.errors import RequestError, nearest
from hpcddp.training.parallel.fresh import is_fresh, replace_parameters
from hpcddp.training.parallel.tensor import TensorPlan, fits

_EXAMPLE = 'rt.wrap(model, stages=["layers.4"]), or this list as the model\'s attribute pipeline_stages'


def find_stages(model: nn.Module, given: Sequence[str] | None, count: int) -> list[str]:
    """The names of the modules that the second and later of `count` stages begin with.

    RequestError for none, or for names that do not cut the model into so many.
    """
    names = getattr(model, "pipeline_stages", None) if given is None else given
    kind = type(model).__name__
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise RequestError(
            f"the ranks are to have {count} stages of this {kind}, and nothing says where each begins", _EXAMPLE
        )
    if len(names) != count - 1:
        raise RequestError(
            f"stages={list(names)!r} cuts the {kind} into {len(names) + 1} stages, and there are {count}",
            f"name the {count - 1} modules at which the stages after the first begin",
        )
    known = [name for name, _ in model.named_modules() if name]
    for name in names:
        if name not in known:
            hint = f"names of model.named_modules(){nearest(name, known)}"
            raise RequestError(f"stages has {name!r}, and the {kind} has no such module", hint)
    if sorted(set(names), key=known.index) != list(names):
        raise RequestError(
            f"stages={list(names)!r} is not in the order of the {kind}'s modules",
            f"stages={sorted(set(names), key=known.index)!r}",
        )
    return list(names)


def keep_plan(model: nn.Module, plan: TensorPlan, names: Sequence[str], stage: int) -> TensorPlan:
    """Of a tensor plan what is for this stage, by whole names."""
    stages = _find_owners(model, names)
    return {path: style for key, style in plan.items() for path in stages if fits(path, key) and stages[path] == stage}


def keep_stage(model: nn.Module, names: Sequence[str], stage: int) -> list[weakref.ref[nn.Parameter]]:
    """Take from the model the parameters and buffers of all stages but this one; returns the parameters.

    The buffers of a module that holds the beginning of a stage, such as the model itself, stay on every stage.
    RequestError for a parameter of two stages, and for a stage without any that is trained.
    """
    stages = _find_owners(model, names)
    _check_apart(model, stages)
    _check_trained(model, names, stages)
    gone: list[weakref.ref[nn.Parameter]] = []
    for path, module in model.named_modules():
        if stages[path] == stage:
            continue
        for name, parameter in [*module.named_parameters(recurse=False)]:
            gone.append(weakref.ref(parameter))
            _take(module, module._parameters, name)
        for name, _ in [] if _holds_one(path, names) else [*module.named_buffers(recurse=False)]:
            module._non_persistent_buffers_set.discard(name)
            _take(module, module._buffers, name)
    return gone


def list_parts(model: nn.Module, names: Sequence[str], path: str = "") -> list[nn.Module]:
    """The largest modules with parameters that compute within one stage, to be sharded one by one.

    `fully_shard` of the whole model follows what goes in and out of it, which a stage in its middle never sees.
    """
    found = []
    for name, module in model.named_children():
        whole = f"{path}{name}"
        if _holds_one(whole, names) or isinstance(module, nn.ModuleList | nn.ModuleDict):
            found += list_parts(module, names, f"{whole}.")
        elif next(module.parameters(), None) is not None:
            found.append(module)
    return found


def leave_out(optimizers: Iterable[Optimizer], gone: Sequence[weakref.ref[nn.Parameter]]) -> None:
    """Take other stages' parameters from optimizers that have not stepped yet. A parameter group may stay empty."""
    others = {id(parameter) for ref in gone if (parameter := ref()) is not None}
    for optimizer in optimizers:
        if is_fresh(optimizer):
            replace_parameters(optimizer, {}, others)


def as_shape(tensor: Tensor) -> Tensor:
    """The same tensor without numbers."""
    return torch.empty_like(tensor.detach(), device="meta").requires_grad_(tensor.requires_grad)


def _find_owners(model: nn.Module, names: Sequence[str]) -> dict[str, int]:
    """The stage of each module, by its name."""
    found, stage = {}, 0
    for path, _ in model.named_modules():
        stage += path in names
        found[path] = stage
    return found


def _holds_one(path: str, names: Sequence[str]) -> bool:
    return not path or any(name.startswith(f"{path}.") for name in names)


def _list_named(model: nn.Module, stages: dict[str, int]) -> Iterator[tuple[str, nn.Parameter, int]]:
    """Each parameter by each of its names, with the stage of that name."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        path = name.rpartition(".")[0]
        while path not in stages:  # a module that is registered twice is listed once
            path = path.rpartition(".")[0]
        yield name, parameter, stages[path]


def _check_apart(model: nn.Module, stages: dict[str, int]) -> None:
    first: dict[int, tuple[str, int]] = {}
    for name, parameter, stage in _list_named(model, stages):
        other, before = first.setdefault(id(parameter), (name, stage))
        if before != stage:
            raise RequestError(
                f"{other} and {name} are one parameter, and belong to two stages of the pipeline, {before} and {stage}",
                'a model whose stages share no parameter, or hpcddp.runtime(parallel="fsdp")',
            )


def _check_trained(model: nn.Module, names: Sequence[str], stages: dict[str, int]) -> None:
    trained = {stage for _, parameter, stage in _list_named(model, stages) if parameter.requires_grad}
    for stage in range(len(names) + 1):
        if stage not in trained:
            begin = f"from {names[stage - 1]} on" if stage else f"before {names[0]}"
            raise RequestError(
                f"stage {stage} of the pipeline, {begin}, has no parameter that is trained",
                "begin the stages at other modules, so that each has some",
            )


def _take(module: nn.Module, held: dict[str, Any], name: str) -> None:
    setattr(module, name, as_shape(held.pop(name)))
