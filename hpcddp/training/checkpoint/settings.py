"""What the script set before it resumed, and what its checkpoint was trained with: lr, betas, step sizes, batch, seed.

Loading a checkpoint puts its own settings back. Settings are compared as the scripts gave them, so that a learning rate
that a scheduler has moved since is no difference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hpcddp.errors import RequestError, nearest
from hpcddp.runs.folder import show_path
from hpcddp.training.marks import sum_bits
from hpcddp.training.parallel.sameness import is_whole
from hpcddp.units import format_count

Settings = dict[str, dict[str, Any]]  # by the object's name, or "optimizer[1]" for its second parameter group

RUN = "the run"  # what belongs to no object: the script's value is in force

_MOVING = ("params", "param_names", "initial_lr", "last_epoch", "base_lrs", "verbose")


class Change(NamedTuple):
    """One setting of one object."""

    thing: str
    name: str
    old: Any
    new: Any


def read_settings(objects: Mapping[str, Any]) -> Settings:
    """The settings of optimizers and schedulers as the script made them: call it before a checkpoint is loaded."""
    found: Settings = {}
    for name, thing in objects.items():
        if isinstance(thing, Optimizer):
            for nth, group in enumerate(thing.param_groups):
                given = group | {"lr": group.get("initial_lr", group["lr"])}
                found[_name(name, nth)] = _keep_plain(given)
        elif isinstance(thing, LRScheduler):
            found[name] = _keep_plain(thing.state_dict())
    return found


def list_changes(old: Settings, new: Settings) -> list[Change]:
    """What both have, and not alike."""
    return [
        Change(thing, name, old[thing][name], value)
        for thing, values in new.items()
        for name, value in values.items()
        if name in old.get(thing, {}) and old[thing][name] != value
    ]


def override(objects: Mapping[str, Any], changes: Sequence[Change], names: Sequence[str]) -> list[Change]:
    """Give the optimizers the new values of the settings `names`, and return the other changes.

    A learning rate that a scheduler has moved is moved from the new start by the same factor. RequestError for a name
    that no optimizer has.
    """
    optimizers = {
        _name(name, nth): (thing, nth)
        for name, thing in objects.items()
        if isinstance(thing, Optimizer)
        for nth in range(len(thing.param_groups))
    }
    known = {key for thing, nth in optimizers.values() for key in thing.param_groups[nth]} - set(_MOVING)
    for name in names:
        if name not in known:
            raise RequestError(
                f"override={name!r} is no setting of the run's optimizers",
                f"choose from {', '.join(sorted(known))}{nearest(name, sorted(known))}",
            )
    left = []
    for change in changes:
        if change.thing == RUN:
            continue
        if change.name not in names or change.thing not in optimizers:
            left.append(change)
            continue
        optimizer, nth = optimizers[change.thing]
        group = optimizer.param_groups[nth]
        if change.name == "lr":
            _move_lr(optimizer, nth, change, [s for s in objects.values() if isinstance(s, LRScheduler)])
        else:
            group[change.name] = tuple(change.new) if isinstance(group[change.name], tuple) else change.new
    return left


def _move_lr(optimizer: Optimizer, nth: int, change: Change, schedulers: Sequence[LRScheduler]) -> None:
    group = optimizer.param_groups[nth]
    now = group["lr"] * (change.new / change.old) if change.old else change.new
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(float(now))
    else:
        group["lr"] = now
    if "initial_lr" in group:
        group["initial_lr"] = change.new
    for scheduler in schedulers:
        if scheduler.optimizer is optimizer:
            scheduler.base_lrs[nth] = change.new


def merge(old: Settings, new: Settings, not_taken: Sequence[Change]) -> Settings:
    """What is in force: the new settings, but of those that were `not_taken` the old ones."""
    merged = {thing: dict(values) for thing, values in new.items()}
    for change in not_taken:
        merged[change.thing][change.name] = old[change.thing][change.name]
    return merged


def describe_changes(changes: Sequence[Change], left: Sequence[Change], step: int) -> Iterator[str]:
    """One line for each change, with the value that is in force."""
    for change in changes:
        words = f"resumed at step {step}: {describe_change(change)}; "
        if change not in left:
            yield words + f"the script's {change.new} is in force"
        else:
            more = f', hpcddp.runtime(override=["{change.name}"]) takes the script\'s' if _can(change) else ""
            yield words + f"the checkpoint's {change.old} is in force{more}"


def describe_change(change: Change) -> str:
    return f"{change.thing}'s {change.name} {change.old} -> {change.new}"


def refuse_other(run: str, other: str) -> NoReturn:
    """RequestError: an earlier start of this job has begun the run, and it was another training than this one, as
    `other` says: this one would get its weights."""
    raise RequestError(
        f"an earlier start of this job has begun run {show_path(run)}, and that was another training: {other}",
        'give each training a run_dir of its own, such as run_dir=f"runs/fold{k}"',
    )


def describe_gone(manifest: Mapping[str, Any], objects: Mapping[str, Any], step: int) -> Iterator[str]:
    """One line for each object of a checkpoint that the script does not track any more."""
    for name, described in manifest["objects"].items():
        if name not in objects:
            yield (
                f"resumed at step {step}: the checkpoint has {name} ({described['type']}), which rt.prepare was not"
                " given now; it is not resumed, and the next checkpoints are without it"
            )


def _can(change: Change) -> bool:
    return change.thing.startswith("optimizer")


def _name(name: str, nth: int) -> str:
    return f"{name}[{nth}]" if nth else name


def _keep_plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """What JSON gives back as it was: numbers, words, and lists of them; tuples as lists, and a tensor's number."""
    kept = {}
    for name, value in values.items():
        plain = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        plain = list(plain) if isinstance(plain, tuple) else plain
        simple = plain if isinstance(plain, list) else [plain]
        if name not in _MOVING and not name.startswith("_") and all(_is_simple(one) for one in simple):
            kept[name] = plain
    return kept


def _is_simple(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


# Whether the objects that a run resumes with are those that its checkpoint was written from.


Groups = dict[str, list[dict[str, Any]]]  # by the optimizer's name, for each of its parameter groups

_SAME_STATE = ({"Adam", "AdamW"},)  # classes of optimizers that read each other's state


def describe_groups(objects: Mapping[str, Any]) -> Groups:
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
            groups = [[names.get(id(p)) for p in group["params"]] for group in thing.param_groups]
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


# Whether what a resumed attempt loaded is still there when its loop begins.


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
