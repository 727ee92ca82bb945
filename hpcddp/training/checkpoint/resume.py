"""Going back to the newest checkpoint that is whole, on as many ranks as there are now and in their own split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from hpcddp.errors import RequestError
from hpcddp.training.checkpoint.files import list_checkpoint_folders, read_checkpoint
from hpcddp.training.checkpoint.manifest import read_manifest
from hpcddp.training.checkpoint.newest import choose_newest
from hpcddp.training.checkpoint.same_objects import check_added_groups, check_same_classes, check_same_groups
from hpcddp.training.checkpoint.state_tree import list_tensors, map_tensors, split_like, write_key
from hpcddp.training.checkpoint.tracked import FindLike, Tracked
from hpcddp.training.rendezvous.group import Group


def resume(group: Group, folder: Path, tracked: Tracked, anew: str) -> dict[str, int] | None:
    """Load the newest checkpoint that verifies, the same one on every rank; returns its position. A collective.

    RequestError if the run's objects are not those of the checkpoint, and the errors of `choose_newest`. `anew`: how to
    begin a new run, for the hint.
    """
    path = choose_newest(group, folder, anew)
    if path is None:
        return None
    tree, manifest = read_checkpoint(path, anew), read_manifest(path)
    absent = sorted(tracked.objects.keys() - tree.keys())
    if absent:
        raise RequestError(
            f"checkpoint {path} has no {', '.join(absent)}, only {', '.join(sorted(tree))}",
            f"track the objects of the first run, or {anew}",
        )
    check_same_classes(manifest, tracked.objects, f"checkpoint {path}", anew)
    position: dict[str, int] = tree["position"]
    tree = tracked.owned.drop_others({name: tree[name] for name in tracked.objects})
    find_like = tracked.find_splits()
    outline = {key: tensor for key, tensor in list_tensors(tree).items() if tensor.is_meta}
    if outline:
        numbers = _read_parts(path, outline, find_like)
        tree = map_tensors(tree, lambda key, tensor: numbers.get(key, tensor))
    else:
        tree = map_tensors(tree, lambda key, whole: split_like(whole, find_like(key, whole.shape)))
    source, hint = f"checkpoint {path}", f"take the model and options of the first run, or {anew}"
    tracked.restore_models(tree, source, hint)
    check_same_groups(manifest, tracked.groups, source, anew)  # after the models: a changed one is named as itself
    check_added_groups(tree, tracked.objects, source)
    tracked.restore_others(tree, source, hint)
    return position


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
        key: sharded.make_room(tensor.shape, tensor.dtype, find_like(key, tensor.shape))
        for key, tensor in outline.items()
    }
    sharded.read_tensors(path, {write_key(key): tensor for key, tensor in room.items()})
    return room
