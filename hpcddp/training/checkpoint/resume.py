"""Going back to the newest checkpoint that is whole, on as many ranks as there are now and in their own split."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from hpcddp.errors import HpcddpError, LaunchError, RequestError
from hpcddp.runs.jsonfile import UnreadableFileError
from hpcddp.training.checkpoint.files import (
    find_fault,
    list_checkpoint_folders,
    read_checkpoint,
    read_manifest,
    set_checkpoint_aside,
)
from hpcddp.training.checkpoint.state_tree import list_tensors, map_tensors, split_like, write_key
from hpcddp.training.checkpoint.tracked import FindLike, Tracked
from hpcddp.training.collectives import broadcast
from hpcddp.training.rendezvous.failure import Failure, PeerFailedError
from hpcddp.training.rendezvous.group import Group
from hpcddp.training.rendezvous.process_group import claim_failure
from hpcddp.units import format_count

# Which checkpoint a run resumes from: the newest one that is whole, the same one on every rank.


_NO_STATE: dict[str, Any] = {"state": {}, "param_groups": []}  # of an optimizer that a checkpoint does not have
PAUSES_S = (1.0, 4.0, 10.0)  # before each further look at a checkpoint that a rank cannot read


class _Look(NamedTuple):
    """What a rank has found in its part of a checkpoint; empty: all is well."""

    damage: str = ""
    unreadable: str = ""


def choose_newest(group: Group, folder: Path, anew: str) -> Path | None:
    """The newest checkpoint whose files are as its manifest says; newer ones, which are damaged, are named and set
    aside. None: there is none. A collective: the ranks share the reading.

    RequestError if all are damaged; they stay as they are. LaunchError on a rank that cannot read one, PeerFailedError
    on the others. `anew`: how to begin a new run, for the hint.
    """
    names = [path.name for path in list_checkpoint_folders(folder)] if group.is_first else []
    damaged: list[tuple[Path, str]] = []
    for path in (folder / name for name in reversed(broadcast(names, group.world_size, group.device))):
        damage = _find_damage(group, path)
        if not damage:
            _set_aside(group, damaged)
            return path
        damaged.append((path, damage))
    if damaged:
        path, damage = damaged[0]
        older = f", and {format_count(len(damaged) - 1, 'older one')} too" if damaged[1:] else ""
        raise RequestError(
            f"checkpoint {path} is damaged ({damage}){older}: the run has no other one to resume from",
            f"restore it from a copy, or {anew}",
        )
    return None


def _set_aside(group: Group, damaged: Sequence[tuple[Path, str]]) -> None:
    for path, damage in damaged if group.is_first else ():
        print(f"hpcddp: checkpoint {path} is damaged ({damage}); an older one is used", file=sys.stderr)
        set_checkpoint_aside(path)


def _find_damage(group: Group, path: Path) -> str:
    """What is wrong with this checkpoint; empty: it is whole. Errors as `choose_newest`."""
    mine = _Look("", "not looked at")
    for pause_s in (0.0, *PAUSES_S):
        time.sleep(pause_s)
        mine = mine if mine == _Look() else _look(path, group.rank, group.world_size)
        looks = _gather(group, mine)
        if all(look == _Look() for look in looks):
            return ""
        rank = next((rank for rank, look in enumerate(looks) if look.damage), None)
        if rank is not None and _is_confirmed(group, path, rank):
            return looks[rank].damage
    rank = next(rank for rank, look in enumerate(looks) if look != _Look())
    why = looks[rank].unreadable or f"{looks[rank].damage}, which another rank does not find"
    raise _refusal(group, path, rank, why)


def _is_confirmed(group: Group, path: Path, rank: int) -> bool:
    """Whether the first rank, or for it the last one, finds damage where this rank does; a rank alone is believed."""
    other = group.world_size - 1 if rank == 0 else 0
    look = _look(path, rank, group.world_size) if group.rank == other else _Look()
    return _gather(group, look)[other].damage != ""


def _look(path: Path, nth: int, parts: int) -> _Look:
    try:
        return _Look(find_fault(path, nth, parts) or "")
    except UnreadableFileError as error:
        return _Look("", error.message)
    except OSError as error:
        return _Look("", f"{error.filename or path} cannot be read: {(error.strerror or str(error)).lower()}")


def _gather(group: Group, look: _Look) -> list[_Look]:
    """Of each rank."""
    looks: list[Any] = [look] * group.world_size
    if group.world_size > 1:
        dist.all_gather_object(looks, look)
    return looks


def _refusal(group: Group, path: Path, rank: int, why: str) -> HpcddpError:
    """What ends the ranks, since this one cannot read the checkpoint."""
    host = group.members[rank].host
    message = f"rank {rank} on {host} cannot read checkpoint {path}, which stays as it is: {why}"
    if group.rank != rank:
        _gather(group, _Look())
        return PeerFailedError(Failure(rank, host, message))
    error = LaunchError(message, f"look at it on {host}: ls -l {path}")
    claim_failure(group, error)
    _gather(group, _Look())  # the others raise theirs after that
    return error


def load_checkpoint(
    path: Path, tracked: Tracked, unloaded: Collection[str], anew: str
) -> tuple[dict[str, int], dict[str, Any]]:
    """Load a checkpoint, the same one on every rank; returns its position, and the states that it has of the `unloaded`
    objects, which keep their own. A collective.

    RequestError if an object does not fit. `anew`: how to begin a new run, for the hint.
    """
    tree = read_checkpoint(path, anew)
    absent = sorted(tracked.objects.keys() - tree.keys() - set(unloaded))
    if absent:
        raise RequestError(
            f"checkpoint {path} has no {', '.join(absent)}, only {', '.join(sorted(tree))}",
            f"track the objects of the first run, or {anew}",
        )
    position: dict[str, int] = tree["position"]
    left = {name: tree[name] for name in unloaded if name in tree}
    tree = tracked.owned.drop_others({name: tree.get(name, _NO_STATE) for name in tracked.objects})
    tree = {name: state for name, state in tree.items() if name not in unloaded}
    find_like = tracked.find_splits()
    outline = {key: tensor for key, tensor in list_tensors(tree).items() if tensor.is_meta}
    if outline:
        numbers = _read_parts(path, outline, find_like)
        tree = map_tensors(tree, lambda key, tensor: numbers.get(key, tensor))
    else:
        tree = map_tensors(tree, lambda key, whole: split_like(whole, find_like(key, whole.shape)))
    source, hint = f"checkpoint {path}", f"take the model and options of the first run, or {anew}"
    tracked.restore_models(tree, source, hint)
    tracked.restore_others(tree, source, hint)
    return position, left


def last_save_s(folder: Path) -> float | None:
    """How long the newest checkpoint took to write, as its manifest says; None without one."""
    for path in reversed(list_checkpoint_folders(folder)):
        try:
            return float(read_manifest(path)["seconds"])
        except (OSError, KeyError, TypeError, ValueError, RequestError):  # a guess will do
            continue
    return None


def _read_parts(path: Path, outline: dict[Any, Tensor], find_like: FindLike) -> dict[Any, Tensor]:
    from hpcddp.training.checkpoint import sharded  # torch.distributed.checkpoint takes half a second to import

    room = {
        key: sharded.make_empty(tensor.shape, tensor.dtype, find_like(key, tensor.shape))
        for key, tensor in outline.items()
    }
    sharded.read_tensors(path, {write_key(key): tensor for key, tensor in room.items()})
    return room
