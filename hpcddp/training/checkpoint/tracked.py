"""Content of a checkpoint, and how it is restored. Nothing in it depends on the number of ranks.

The state of a run is a tree of dicts, lists and values, whose tensors may be whole or sharded over the ranks. Its
outline is the tree with tensors that have a shape and a type and no numbers (torch's device "meta"): small enough for
one file, and all that is needed to read the numbers back in another split.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import json
import pickle
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hpcddp.errors import RequestError
from hpcddp.training.collectives import ask_all
from hpcddp.training.parallel.zero import ZeroSteps
from hpcddp.training.torch_compat import uncompiled
from hpcddp.units import shorten

Path = tuple[Any, ...]  # the keys that lead to a value: ("optimizer", "state", 0, "exp_avg")
FindLike = Callable[[Path, torch.Size], Any]
_PIECE = 1 << 24  # elements: what is copied from a device at once


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


def format_key(path: Path) -> str:
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


def unwrap(model: nn.Module) -> nn.Module:
    """The user's model inside DDP and torch.compile, or the model itself."""
    return uncompiled(model.module if isinstance(model, DistributedDataParallel) else model)


class Tracked:
    """The objects that a run consists of, by name: each has `state_dict` and `load_state_dict`."""

    def __init__(
        self, objects: dict[str, Any], zero: Mapping[str, ZeroSteps] | None = None, *, hashes_split: bool = False
    ) -> None:
        """`zero`: the optimizers, by name, of which each data rank has the state of its own parameters only (ZeRO-1).
        `hashes_split`: split models are hashed, too, for which each tensor is gathered."""
        for name, tracked in objects.items():
            if not (hasattr(tracked, "state_dict") and hasattr(tracked, "load_state_dict")):
                kind = type(tracked).__name__
                raise RequestError(
                    f"rt.track({name}=…) got a {kind}, which has no state_dict() and load_state_dict()",
                    "track models, optimizers, schedulers, and what else has both methods",
                )
        self.objects = {
            name: unwrap(tracked) if isinstance(tracked, nn.Module) else tracked for name, tracked in objects.items()
        }
        self.hashes_split = hashes_split
        self._zero = zero or {}

    def models(self) -> list[nn.Module]:
        return [tracked for tracked in self.objects.values() if isinstance(tracked, nn.Module)]

    def is_split(self) -> bool:
        """Whether ranks hold shards of a model only.

        The state says it: after an evaluation the parameters are whole until the next pass, and `state_dict()` shards
        them again.
        """
        return any(is_split(value) for model in self.models() for value in model.state_dict().values())

    def is_in_parts(self) -> bool:
        """Whether no rank has all that a checkpoint holds."""
        return bool(self._zero) or self.is_split()

    def hash_weights(self, *, gather: bool = False) -> str | None:
        """SHA-256 of all models, averaged weights (EMA) included, as they are on this rank: see `hash_states`.

        Where ranks hold parts only, None; or with `gather`, which makes it a collective, that of the whole.
        """
        if not gather and self.is_split():
            return None
        return hash_states({name: tracked for name, tracked in self.objects.items() if isinstance(tracked, nn.Module)})

    def capture(self) -> dict[str, Any]:
        """Every object's state by name, with the run's own tensors in it, not copies."""
        return {
            name: module_state(tracked) if isinstance(tracked, nn.Module) else tracked.state_dict()
            for name, tracked in self.objects.items()
        }

    def merge_outlines(self, outline: dict[str, Any]) -> dict[str, Any]:
        """The outline of a captured tree with all ranks' states, from that of each. A collective under ZeRO-1."""
        merged = dict(outline)
        for name, steps in self._zero.items():
            parts = ask_all(outline[name]["state"], steps.layout.data_size, steps.layout.data_group)
            states = {key: value for part in parts for key, value in part.items()}
            in_order = dict(sorted(states.items(), key=lambda item: str(item[0]).zfill(9)))
            merged[name] = {**outline[name], "state": in_order}
        return merged

    def drop_others(self, tree: dict[str, Any]) -> dict[str, Any]:
        """A checkpoint's tree, of the states only those that this rank has."""
        dropped = dict(tree)
        for name, steps in self._zero.items():
            owners, me = dict(enumerate(steps.list_owners())), steps.layout.data_rank
            state = {key: value for key, value in tree[name]["state"].items() if owners.get(key, 0) == me}
            dropped[name] = {**tree[name], "state": state}
        return dropped

    def find_splits(self) -> FindLike:
        """A function of a saved tensor's path and shape: this run's split tensor that it has to be split like, or None:
        leave it whole.

        An optimizer's numbers are split as its parameters are, which it counts in an order that no split changes.
        """
        likes: dict[Path, Any] = {}
        for name, tracked in self.objects.items():
            if isinstance(tracked, nn.Module):
                likes |= {(name, key): value for key, value in module_state(tracked).items() if is_split(value)}
            elif isinstance(tracked, Optimizer):
                parameters = [parameter for group in tracked.param_groups for parameter in group["params"]]
                likes |= {(name, "state", n): p.detach() for n, p in enumerate(parameters) if is_split(p)}

        def find(path: Path, shape: torch.Size) -> Any:
            like = likes.get(path[:2], likes.get(path[:3]))
            return like if like is not None and like.shape == shape else None

        return find

    def restore(self, tree: dict[str, Any], source: str, hint: str) -> None:
        """Load every object's state that is there, models first. Optimizers with one list of groups, as of SAM, have
        one afterwards, too. RequestError, which names the `source`, if a state does not fit."""
        optimizers = [tracked for tracked in self.objects.values() if isinstance(tracked, Optimizer)]
        owners: dict[int, Optimizer] = {}  # the first optimizer with a list of groups, by the list's id
        shared = [(one, owners.setdefault(id(one.param_groups), one)) for one in optimizers]
        for name, tracked in sorted(self.objects.items(), key=lambda item: not isinstance(item[1], nn.Module)):
            if name not in tree:
                continue
            try:
                if isinstance(tracked, nn.Module):
                    load_module_state(tracked, tree[name])
                else:
                    tracked.load_state_dict(tree[name])
            except (RuntimeError, ValueError, KeyError, TypeError) as error:  # torch's words for: another shape
                words = " ".join(str(error).split())
                # the first one that torch lists, and not hundreds of parameters' names
                what = shorten(words.partition(": ")[2] or words)
                raise RequestError(f"{source} does not fit {name} ({type(tracked).__name__}): {what}", hint) from error
        for one, owner in shared:
            one.param_groups = owner.param_groups


def hash_states(objects: Mapping[str, nn.Module]) -> str:
    """SHA-256 over every parameter and every saved buffer of the models, by `object.name` in sorted order.

    Two runs with equal ones ended the same. Each tensor goes in with its name, dtype, shape and bytes. The device, the
    memory format and a DDP wrapper around the model or around a part of it make no difference; one bit of one number
    does. A collective where tensors are split: one at a time is whole.
    """
    states = ((f"{name}.{path}", value) for name, one in objects.items() for path, value in module_state(one).items())
    found = {path: value for path, value in states if isinstance(value, Tensor)}
    digest = hashlib.sha256()
    for name in sorted(found):
        _add_tensor(digest, name, gather_whole(found[name], keep=True))
    return digest.hexdigest()


def _add_tensor(digest: hashlib._Hash, name: str, tensor: Tensor) -> None:
    """The header tells how many bytes follow, so that no two sets of tensors give the same stream."""
    digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode() + b"\n")
    for piece in torch.split(tensor.detach().contiguous().reshape(-1), _PIECE):
        raw = piece.cpu().view(torch.uint8)
        if raw.numel():
            digest.update((ctypes.c_char * raw.numel()).from_address(raw.data_ptr()))  # no numpy, and no copy
