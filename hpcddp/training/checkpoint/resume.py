"""Going back to the newest checkpoint that is whole, on as many ranks as there are now and in their own split."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcddp.errors import LaunchError, RequestError
from hpcddp.runs.jsonfile import UnreadableFileError
from hpcddp.training.activity import at_files
from hpcddp.training.checkpoint.files import find_fault, list_checkpoint_folders, read_checkpoint
from hpcddp.training.checkpoint.tracked import Tracked, format_key, list_tensors, map_tensors, split_like
from hpcddp.training.collectives import ask_all, broadcast
from hpcddp.training.rendezvous.group import Group
from hpcddp.units import format_count

_NO_STATE: dict[str, Any] = {"state": {}, "param_groups": []}  # of an optimizer that a checkpoint does not have
PAUSES_S = (1.0, 4.0, 10.0)  # before each further look at a checkpoint that a rank cannot read


def choose_newest(group: Group, folder: Path, anew: str) -> Path | None:
    """`find_newest` for the ranks of a group, which share the reading; what is damaged is set aside. A collective."""
    names = [path.name for path in list_checkpoint_folders(folder)] if group.is_first else []
    paths = [folder / name for name in broadcast(names, group.world_size, group.device)]
    readers = [f"rank {member.rank} on {member.host}" for member in group.members]
    newest, damaged = find_newest(paths, lambda path: find_damage(path, readers, group.rank), anew)
    if group.is_first:
        set_aside(damaged)
    return newest


def find_newest(
    paths: Sequence[Path], find_damage: Callable[[Path], str], anew: str
) -> tuple[Path | None, dict[str, str]]:
    """The newest of these checkpoints whose files are as its manifest says; and the newer ones, each with its damage.
    None: there are no checkpoints.

    RequestError if all are damaged. `anew`: how to begin a new run, for the hint.
    """
    damaged: dict[str, str] = {}
    for path in reversed(paths):
        damage = find_damage(path)
        if not damage:
            return path, damaged
        damaged[str(path)] = damage
    if damaged:
        first, damage = next(iter(damaged.items()))
        older = f", and {format_count(len(damaged) - 1, 'older one')} too" if len(damaged) > 1 else ""
        raise RequestError(
            f"checkpoint {first} is damaged ({damage}){older}: the run has no other one to resume from",
            f"restore it from a copy, or {anew}",
        )
    return None, damaged


@at_files()
def set_aside(damaged: Mapping[str, str]) -> None:
    """Rename damaged checkpoints, so that their steps can be written again and nothing counts them."""
    for path, damage in damaged.items():
        print(f"hpcddp: checkpoint {path} is damaged ({damage}); an older one is used", file=sys.stderr, flush=True)
        os.rename(path, f"{path}.damaged-{os.getpid()}")


def find_damage(path: Path, readers: Sequence[str], nth: int = 0, framework: str | None = None) -> str:
    """The damage of a checkpoint that this `framework` wrote (None: hpcddp.runtime); empty: it is whole. Each of the
    `readers`, of which this process is the nth, reads a part: a collective of all ranks, or of one.

    LaunchError, on each of them, if one cannot read its part: that is no damage. RequestError as of `find_fault`.
    """
    answers: list[tuple[str, str]] = []
    for pause_s in (0.0, *PAUSES_S):
        time.sleep(pause_s)
        answers = ask_all(_check_part(path, nth, len(readers), framework), len(readers))
        damage = next((damage for damage, _ in answers if damage), "")
        if damage or not any(unreadable for _, unreadable in answers):
            return damage
    reader, why = next((reader, why) for reader, (_, why) in zip(readers, answers, strict=True) if why)
    raise LaunchError(
        f"{reader} cannot read checkpoint {path}, which stays as it is: {why}", f"look at it there: ls -l {path}"
    )


def _check_part(path: Path, nth: int, parts: int, framework: str | None) -> tuple[str, str]:
    """The damage of this rank's part of a checkpoint, and why it cannot be read; empty: none."""
    try:
        return find_fault(path, nth, parts, framework) or "", ""
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
        sharded.read_tensors(path, {format_key(key): tensor for key, tensor in numbers.items()})
        tree = map_tensors(tree, lambda key, tensor: numbers.get(key, tensor))
    else:
        tree = map_tensors(tree, lambda key, whole: split_like(whole, find_like(key, whole.shape)))
    tracked.restore(tree, f"checkpoint {path}", f"take the model and options of the first run, or {anew}")
    return position, left
