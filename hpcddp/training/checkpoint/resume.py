"""Going back to the newest checkpoint that is whole, on as many ranks as there are now and in their own split."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from hpcddp.errors import LaunchError, RequestError
from hpcddp.runs.jsonfile import UnreadableFileError
from hpcddp.training.checkpoint.files import find_fault, list_checkpoint_folders, read_checkpoint
from hpcddp.training.checkpoint.tracked import Tracked, list_tensors, map_tensors, split_like, write_key
from hpcddp.training.collectives import ask_all, broadcast
from hpcddp.training.rendezvous.group import Group
from hpcddp.units import format_count

_NO_STATE: dict[str, Any] = {"state": {}, "param_groups": []}  # of an optimizer that a checkpoint does not have
PAUSES_S = (1.0, 4.0, 10.0)  # before each further look at a checkpoint that a rank cannot read


def choose_newest(group: Group, folder: Path, anew: str) -> Path | None:
    """Choose the newest checkpoint whose files are as its manifest says; newer ones, which are damaged, are set aside.
    None: there is none. A collective: the ranks share the reading.

    RequestError if all are damaged; LaunchError if a rank cannot read one; both leave them as they are. `anew`: how to
    begin a new run, for the hint.
    """
    names = [path.name for path in list_checkpoint_folders(folder)] if group.is_first else []
    damaged: list[tuple[Path, str]] = []
    for path in (folder / name for name in reversed(broadcast(names, group.world_size, group.device))):
        damage = _find_damage(group, path)
        if not damage:
            for other, its in damaged if group.is_first else ():
                print(f"hpcddp: checkpoint {other} is damaged ({its}); an older one is used", file=sys.stderr)
                other.rename(f"{other}.damaged-{os.getpid()}")  # so that its step can be written again
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


def _find_damage(group: Group, path: Path) -> str:
    """Find the damage of this checkpoint, of which each rank reads a part; empty: it is whole. LaunchError as of
    `choose_newest`."""
    answers: list[tuple[str, str]] = []
    for pause_s in (0.0, *PAUSES_S):
        time.sleep(pause_s)
        answers = ask_all(_check_part(path, group.rank, group.world_size), group.world_size)
        damage = next((damage for damage, _ in answers if damage), "")
        if damage or not any(unreadable for _, unreadable in answers):
            return damage
    rank, why = next((rank, unreadable) for rank, (_, unreadable) in enumerate(answers) if unreadable)
    host = group.members[rank].host
    raise LaunchError(
        f"rank {rank} on {host} cannot read checkpoint {path}, which stays as it is: {why}",
        f"look at it on {host}: ls -l {path}",
    )


def _check_part(path: Path, nth: int, parts: int) -> tuple[str, str]:
    """The damage of this rank's part of a checkpoint, and why it cannot be read; empty: none."""
    try:
        return find_fault(path, nth, parts) or "", ""
    except UnreadableFileError as error:
        return "", error.message
    except OSError as error:
        return "", f"{error.filename or path} cannot be read: {(error.strerror or str(error)).lower()}"


def load_checkpoint(
    path: Path, tracked: Tracked, unloaded: Collection[str], anew: str
) -> tuple[dict[str, int], dict[str, Any]]:
    """Load a checkpoint, the same one on every rank; returns its position, and the states that it has of the `unloaded`
    objects, which keep their own. A collective.

    RequestError if an object does not fit. `anew`: how to begin a new run, for the hint.
    """
    tree = read_checkpoint(path)
    position: dict[str, int] = tree["position"]
    left = {name: tree[name] for name in unloaded if name in tree}
    tree = tracked.drop_others({name: tree.get(name, _NO_STATE) for name in tracked.objects})
    tree = {name: state for name, state in tree.items() if name not in unloaded}
    find_like = tracked.find_splits()
    outline = {key: tensor for key, tensor in list_tensors(tree).items() if tensor.is_meta}
    if outline:
        from hpcddp.training.checkpoint import sharded  # torch.distributed.checkpoint takes half a second to import

        numbers = {
            key: sharded.make_empty(tensor.shape, tensor.dtype, find_like(key, tensor.shape))
            for key, tensor in outline.items()
        }
        sharded.read_tensors(path, {write_key(key): tensor for key, tensor in numbers.items()})
        tree = map_tensors(tree, lambda key, tensor: numbers.get(key, tensor))
    else:
        tree = map_tensors(tree, lambda key, whole: split_like(whole, find_like(key, whole.shape)))
    source, hint = f"checkpoint {path}", f"take the model and options of the first run, or {anew}"
    tracked.restore_models(tree, source, hint)
    tracked.restore_others(tree, source, hint)
    return position, left
