"""The state of a run as a tree of dicts, lists and values, whose tensors may be whole or sharded over the ranks.

The outline of a tree is the tree itself with tensors that have a shape and a type and no numbers (torch's device
"meta"): small enough for one file, and all that is needed to read the numbers back in another split.
"""

from __future__ import annotations

import io
import json
import pickle
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpcddp.errors import RequestError

Path = tuple[Any, ...]  # the keys that lead to a value: ("optimizer", "state", 0, "exp_avg")


def map_tensors(tree: Any, change: Callable[[Path, Tensor], Any], path: Path = ()) -> Any:
    """The same tree with each tensor replaced by `change(path, tensor)`, in the order of the tree."""
    if isinstance(tree, Tensor):
        return change(path, tree)
    if isinstance(tree, dict):
        return {key: map_tensors(value, change, (*path, key)) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map_tensors(value, change, (*path, n)) for n, value in enumerate(tree))
    return tree


def list_tensors(tree: Any) -> dict[Path, Tensor]:
    """Every tensor of a tree by its path."""
    found: dict[Path, Tensor] = {}
    map_tensors(tree, found.__setitem__)
    return found


def make_outline(tree: dict[str, Any]) -> dict[str, Any]:
    """The tree with shapes in place of numbers. RequestError if it holds what a checkpoint could not be read back from.

    The check comes before the first checkpoint is written, so that no run finds the fault when it resumes.
    """
    outline: dict[str, Any] = map_tensors(
        tree, lambda _, tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    )
    for name, part in outline.items():
        file = io.BytesIO()
        try:
            torch.save(part, file)
            file.seek(0)
            torch.load(file, map_location="cpu", weights_only=True)
        except (pickle.PickleError, AttributeError, TypeError) as error:
            raise RequestError(
                f"the state of {name} holds more than tensors and plain values, and could not be read back",
                f"see what {name}.state_dict() returns: convert numpy numbers with float() or int(), leave functions"
                " out",
            ) from error
    return outline


def write_key(path: Path) -> str:
    """A path as the one string that names its tensor in the files of a split checkpoint."""
    return json.dumps(path, default=str)


def is_split(tensor: Any) -> bool:
    """Whether it is a DTensor: each rank holds a shard. This does not import DTensor, which takes a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def gather_whole(tree: Any, *, keep: bool) -> Any:
    """The tree with whole tensors on the CPU where it had split ones. A collective; only `keep` needs the result."""

    def whole(_path: Path, tensor: Any) -> Any:
        if not is_split(tensor):
            return tensor
        full = tensor.full_tensor()
        return full.cpu() if keep else None

    return map_tensors(tree, whole)


def split_like(tensor: Tensor, like: Any) -> Tensor:
    """A whole tensor, alike on all ranks, split as `like` is. A collective where that is split."""
    if not is_split(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, like.device_mesh, like.placements)


def module_state(module: nn.Module) -> dict[str, Any]:
    """`state_dict()` by the names that the parameters have without DDP, also where a part of the module is in DDP.

    That is the case in torch's AveragedModel of a wrapped model, whose names otherwise depend on the number of ranks.
    """
    wrapped = _list_wrapped(module)
    return {_plain_name(name, wrapped): value for name, value in module.state_dict().items()}


def name_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by those names."""
    wrapped = _list_wrapped(module)
    return {_plain_name(name, wrapped): parameter for name, parameter in module.named_parameters()}


def load_module_state(module: nn.Module, state: dict[str, Any]) -> None:
    """The inverse of `module_state`; errors are those of `load_state_dict`."""
    wrapped, current = _list_wrapped(module), module.state_dict()
    names = {_plain_name(name, wrapped): name for name in current}
    current.clear()  # and not another dict: torch keeps the version of each layer's state in an attribute of this one
    current.update({names.get(name, name): value for name, value in state.items()})
    module.load_state_dict(current)


def _list_wrapped(module: nn.Module) -> list[str]:
    """Prefixes of the parts in DDP, the innermost last."""
    parts = module.named_modules()
    return [f"{path}." if path else "" for path, part in parts if isinstance(part, DistributedDataParallel)]


def _plain_name(name: str, wrapped: list[str]) -> str:
    for prefix in reversed(wrapped):  # the innermost first: the outer prefixes still fit
        if name.startswith(f"{prefix}module."):
            name = prefix + name[len(prefix) + len("module.") :]
    return name
