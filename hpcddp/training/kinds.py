"""The kinds of objects that a run takes over, and their names in a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset

from hpcddp.errors import RequestError

_KINDS = {nn.Module: "model", Optimizer: "optimizer", LRScheduler: "scheduler", GradScaler: "scaler"}


def check_objects(objects: Sequence[Any]) -> None:
    """RequestError for objects that a run cannot take over."""
    if not objects:
        raise RequestError(
            "rt.prepare() was given nothing", "model, optimizer, loader = rt.prepare(model, optimizer, loader)"
        )
    for thing in objects:
        if isinstance(thing, nn.Module):
            check_made(thing)
        if isinstance(thing, Dataset):
            raise RequestError(
                f"rt.prepare was given a data set, {type(thing).__name__}",
                "give it a DataLoader, or make one with rt.loader(dataset)",
            )
        if isinstance(thing, DataLoader):
            continue
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise RequestError(
                f"rt.prepare was given a {type(thing).__name__}, which has no state_dict() and load_state_dict()",
                "give it models, optimizers, schedulers, scalers, DataLoaders, and what else has both methods",
            )


def check_model(model: nn.Module, others: Sequence[nn.Module]) -> None:
    """RequestError for a model that is distributed already, has no weights yet, or has one of the others'."""
    if isinstance(model, DistributedDataParallel | nn.DataParallel):
        raise RequestError(
            f"the model is in {type(model).__name__} already, and the runtime distributes it", "give it the plain model"
        )
    check_made(model)
    _check_apart(model, others)


def check_made(model: nn.Module) -> None:
    """RequestError for a model with lazy layers that have no weights yet."""
    for name, layer in model.named_modules():
        tensors = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
        if any(isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer) for tensor in tensors):
            raise RequestError(
                f"{name or 'the model'}, a {type(layer).__name__}, has no weights before its first forward pass",
                "model(next(iter(loader))[0]) once, then make the optimizer, then rt.prepare",
            )


def _check_apart(model: nn.Module, others: Sequence[nn.Module]) -> None:
    """RequestError for a model that is one of the others, or has a trained parameter in common with one.

    DDP allows each parameter in one model: two would both average its gradient.
    """
    taken = {id(p): other for other in others for p in other.parameters() if p.requires_grad}
    for name, parameter in model.named_parameters():
        if id(parameter) in taken:
            other = taken[id(parameter)]
            other = other.module if isinstance(other, DistributedDataParallel) else other
            if other is model:
                raise RequestError(
                    f"this {type(model).__name__} was prepared already",
                    "model, optimizer, loader = rt.prepare(model, optimizer, loader): all of them in one call",
                )
            raise RequestError(
                f"{name} of this {type(model).__name__} is in another prepared model too, a {type(other).__name__}:"
                " the ranks average the gradient of a parameter for one model only",
                "one nn.Module that holds both and calls them in its forward: both = rt.prepare(both, …)",
            )


def is_trained(thing: Any) -> bool:
    """Whether it is a model with parameters that an optimizer moves. Averaged weights (EMA) are copies of such."""
    return (
        isinstance(thing, nn.Module)
        and not isinstance(thing, AveragedModel)
        and any(parameter.requires_grad for parameter in thing.parameters())
    )


def name_objects(objects: Sequence[Any]) -> dict[str, Any]:
    """Names for a checkpoint, by kind and order: model, model_2, optimizer, scheduler, scaler, …"""
    named: dict[str, Any] = {}
    for thing in objects:
        kind = next((name for cls, name in _KINDS.items() if isinstance(thing, cls)), type(thing).__name__.lower())
        nth = sum(name == kind or name.startswith(f"{kind}_") for name in named) + 1
        named[kind if nth == 1 else f"{kind}_{nth}"] = thing
    return named
