"""Whether the objects that a run resumes with are those that its checkpoint was written from.

torch restores the state of an optimizer by position: the third parameter gets what the third one had. So a checkpoint's
manifest says which parameters those were, by a SHA-256 over their names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hpcddp.errors import RequestError
from hpcddp.units import format_count

Join = Callable[[list[list[str | None]]], list[list[str | None]]]
Groups = dict[str, list[dict[str, Any]]]  # by the optimizer's name, for each of its parameter groups

_SAME_STATE = ({"Adam", "AdamW"},)  # classes of optimizers that read each other's state


def describe_groups(objects: Mapping[str, Any], join: Join) -> Groups:
    """How many parameters each group of each optimizer has, and the SHA-256 over their names in order.

    A parameter's name is that of its tracked model, and its own in there. An optimizer with a parameter of no tracked
    model is left out.
    """
    models = ((name, thing) for name, thing in objects.items() if isinstance(thing, nn.Module))
    names: dict[int, str] = {}
    for model, thing in models:
        for name, parameter in thing.named_parameters():
            names.setdefault(id(parameter), f"{model}.{name}")
    found: Groups = {}
    for name, thing in objects.items():
        if isinstance(thing, Optimizer):
            groups = join([[names.get(id(p)) for p in group["params"]] for group in thing.param_groups])
            if all(None not in group for group in groups):
                found[name] = [{"parameters": len(group), "sha256": _hash_names(group)} for group in groups]
    return found


def _hash_names(names: list[str | None]) -> str:
    return hashlib.sha256("".join(f"{name}\n" for name in names).encode()).hexdigest()


def check_same_classes(manifest: Mapping[str, Any], objects: Mapping[str, Any], source: str, anew: str) -> None:
    """RequestError for an optimizer or a scheduler of another class than the checkpoint's, whose state is another."""
    for name, thing in objects.items():
        old, new = manifest["objects"].get(name, {}).get("type"), type(thing).__name__
        if old in (None, new) or not isinstance(thing, Optimizer | LRScheduler):
            continue
        if not any({old, new} <= classes for classes in _SAME_STATE):
            raise RequestError(
                f"{source} has the state of {name} as that of a {old}, and {name} is a {new} now",
                f"resume with {old}, or {anew}",
            )


def check_same_groups(manifest: Mapping[str, Any], groups: Groups, source: str, anew: str) -> None:
    """RequestError for an optimizer with other parameters than the checkpoint's, or in another order."""
    for name, described in manifest["parameter_groups"].items():
        old = [{key: group[key] for key in ("parameters", "sha256")} for group in described]
        new = groups.get(name, old)
        if new != old:
            raise RequestError(
                f"{source} has the state of {name} for other parameters: {_say_other(old, new)}. It would be given to"
                " the wrong parameters",
                "keep the order of the script that wrote the checkpoint, of the arguments of rt.prepare, of the layers"
                f" and of the optimizer's parameters, or {anew}",
            )


def check_added_groups(tree: Mapping[str, Any], objects: Mapping[str, Any], source: str) -> None:
    """RequestError for an optimizer that got a parameter group after rt.prepare, and has not got it yet this time.

    Call it after `check_same_groups`: at rt.prepare its groups were those of now.
    """
    for name, thing in objects.items():
        if isinstance(thing, Optimizer):
            old, new = len(tree[name].get("param_groups", ())), len(thing.param_groups)
            if old > new:
                raise RequestError(
                    f"{source} has {format_count(old, 'parameter group')} of {name}, and the script has given it {new}"
                    " by rt.prepare: the rest was added later, and a resume loads all of them there",
                    "optimizer.add_param_group({…}) before rt.prepare, with lr=0.0 until its turn comes",
                )


def _say_other(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> str:
    if len(old) != len(new):
        return f"it had {format_count(len(old), 'parameter group')}, and has {len(new)} now"
    nth = next(n for n, both in enumerate(zip(old, new, strict=True)) if both[0] != both[1])
    where = f"its parameter group {nth}" if len(old) > 1 else "it"
    counts = old[nth]["parameters"], new[nth]["parameters"]
    if counts[0] != counts[1]:
        return f"{where} had {format_count(counts[0], 'parameter')}, and has {counts[1]} now"
    return f"{where} has as many now, but others or in another order"
