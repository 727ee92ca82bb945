"""What the script set before it resumed, and what its checkpoint was trained with: lr, betas, step sizes, batch, seed.

Loading a checkpoint puts its own settings back. Settings are compared as the scripts gave them, so that a learning rate
that a scheduler has moved since is no difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hpcddp.errors import RequestError, nearest
from hpcddp.runs.folder import show_path

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
