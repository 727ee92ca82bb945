"""What a checkpoint holds, and bringing it back. Nothing in it depends on the number of ranks."""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hpcddp.errors import RequestError
from hpcddp.training.checkpoint.state_tree import gather_whole, is_split, load_module_state, map_tensors, module_state
from hpcddp.training.parallel.layout import as_bytes
from hpcddp.training.parallel.zero import ZeroSteps
from hpcddp.training.torch_compat import uncompiled
from hpcddp.units import shorten

# Optimizer states of which each data rank has its own parameters' only (ZeRO-1), in checkpoints that have them all.


class OwnedStates:
    """The states of these optimizers, by their names in the checkpoint. Without any its methods do nothing."""

    def __init__(self, steps: Mapping[str, ZeroSteps]) -> None:
        self._steps = steps

    def drop_others(self, tree: dict[str, Any]) -> dict[str, Any]:
        """A checkpoint's tree, of the states only this rank's."""
        dropped = dict(tree)
        for name, steps in self._steps.items():
            owners, me = _Owners(steps), steps.layout.data_rank
            state = {key: value for key, value in tree[name]["state"].items() if owners.find(key) == me}
            dropped[name] = {**tree[name], "state": state}
        return dropped

    def merge_outlines(self, outline: dict[str, Any]) -> dict[str, Any]:
        """The outline with all ranks' states, from that of each. A collective."""
        merged = dict(outline)
        for name, steps in self._steps.items():
            parts: list[Any] = [None] * steps.layout.data_size
            dist.all_gather_object(parts, outline[name]["state"], group=steps.layout.data_group)
            states = {key: value for part in parts for key, value in part.items()}
            merged[name] = {
                **outline[name],
                "state": dict(sorted(states.items(), key=lambda item: str(item[0]).zfill(9))),
            }
        return merged

    def gather(self, tree: dict[str, Any], outline: dict[str, Any], *, keep: bool) -> dict[str, Any]:
        """The tree with all ranks' states, on the CPU, from a merged outline. A collective; only `keep` needs the
        result, and only one tensor at a time is on the device."""
        whole = dict(tree)
        for name, steps in self._steps.items():
            owners, mine = _Owners(steps), tree[name]["state"]
            states = {
                key: _gather_one(mine.get(key), empty, owners.find(key), steps, keep=keep)
                for key, empty in outline[name]["state"].items()
            }
            whole[name] = {**tree[name], "state": states}
        return whole


class _Owners:
    """Which data rank has the state of a key: of a parameter's number, or of what else an optimizer keeps there."""

    def __init__(self, steps: ZeroSteps) -> None:
        self._by_number = steps.list_owners()

    def find(self, key: Any) -> int:
        return self._by_number[key] if isinstance(key, int) and key < len(self._by_number) else 0


def _gather_one(mine: Any, outline: Any, owner: int, steps: ZeroSteps, *, keep: bool) -> Any:
    """The state of one key, from its owner."""
    own: dict[Any, Tensor] = {}
    if owner == steps.layout.data_rank:
        map_tensors(mine, own.__setitem__)

    def bring(path: Any, empty: Tensor) -> Any:
        there = own[path] if own else torch.empty(empty.shape, dtype=empty.dtype)
        there = there.to(steps.device).contiguous()
        if there.numel():
            dist.broadcast(as_bytes(there), src=steps.layout.data_ranks[owner], group=steps.layout.data_group)
        return there.cpu() if keep else None

    return map_tensors(outline, bring)


def unwrap(model: nn.Module) -> nn.Module:
    """The user's model inside DDP and torch.compile, or the model itself."""
    return uncompiled(model.module if isinstance(model, DistributedDataParallel) else model)


FindLike = Callable[[tuple[Any, ...], torch.Size], Any]


class Tracked:
    """The objects that a run consists of, by name: each has `state_dict` and `load_state_dict`."""

    def __init__(
        self, objects: dict[str, Any], owned: OwnedStates | None = None, *, hashes_split: bool = False
    ) -> None:
        for name, thing in objects.items():
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise RequestError(
                    f"rt.track({name}=…) got a {type(thing).__name__}, which has no state_dict() and load_state_dict()",
                    "track models, optimizers, schedulers, and what else has both methods",
                )
        self.objects = {
            name: unwrap(thing) if isinstance(thing, nn.Module) else thing for name, thing in objects.items()
        }
        self.owned = owned or OwnedStates({})
        self.hashes_split = hashes_split  # whether split models are hashed, too: each tensor is gathered for that

    def models(self) -> list[nn.Module]:
        return [thing for thing in self.objects.values() if isinstance(thing, nn.Module)]

    def is_split(self) -> bool:
        """Whether ranks hold shards of a model only.

        The state says it: after an evaluation the parameters are whole until the next pass, and `state_dict()` shards
        them again.
        """
        return any(is_split(value) for model in self.models() for value in model.state_dict().values())

    def hash_weights(self, *, gather: bool = False) -> str | None:
        """SHA-256 of all models, averaged weights (EMA) included, as they are on this rank: see `hash_states`.

        Where ranks hold parts only, None; or with `gather`, which makes it a collective, that of the whole.
        """
        if not gather and self.is_split():
            return None
        return hash_states({name: thing for name, thing in self.objects.items() if isinstance(thing, nn.Module)})

    def capture(self) -> dict[str, Any]:
        """Every object's state by name, with the run's own tensors in it, not copies."""
        return {
            name: module_state(thing) if isinstance(thing, nn.Module) else thing.state_dict()
            for name, thing in self.objects.items()
        }

    def find_splits(self) -> FindLike:
        """A function of a saved tensor's path and shape: this run's split tensor that it has to be split like, or None:
        leave it whole.

        An optimizer's numbers are split as its parameters are, which it counts in an order that no split changes.
        """
        likes: dict[tuple[Any, ...], Any] = {}
        for name, thing in self.objects.items():
            if isinstance(thing, nn.Module):
                likes |= {(name, key): value for key, value in module_state(thing).items() if is_split(value)}
            elif isinstance(thing, Optimizer):
                parameters = [parameter for group in thing.param_groups for parameter in group["params"]]
                likes |= {(name, "state", n): p.detach() for n, p in enumerate(parameters) if is_split(p)}

        def find(path: tuple[Any, ...], shape: torch.Size) -> Any:
            like = likes.get(path[:2], likes.get(path[:3]))
            return like if like is not None and like.shape == shape else None

        return find

    def restore_models(self, tree: dict[str, Any], source: str, hint: str) -> None:
        """Load every model's state that is there. RequestError, which names the `source`, if one does not fit."""
        for name, thing in self.objects.items():
            if isinstance(thing, nn.Module) and name in tree:
                with _fitting(f"{source} does not fit {name} ({type(thing).__name__})", hint):
                    load_module_state(thing, tree[name])

    def restore_others(self, tree: dict[str, Any], source: str, hint: str) -> None:
        """The same for every other object. Optimizers with one list of groups, as of SAM, have one afterwards, too."""
        optimizers = [thing for thing in self.objects.values() if isinstance(thing, Optimizer)]
        shared = [
            (one, other)
            for nth, one in enumerate(optimizers)
            for other in optimizers[:nth]
            if one.param_groups is other.param_groups
        ]
        for name, thing in self.objects.items():
            if not isinstance(thing, nn.Module) and name in tree:
                with _fitting(f"{source} does not fit {name} ({type(thing).__name__})", hint):
                    thing.load_state_dict(tree[name])
        for one, other in shared:
            one.param_groups = other.param_groups


@contextmanager
def _fitting(what: str, hint: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError, KeyError, TypeError) as error:  # torch's words for: another shape
        raise RequestError(f"{what}: {_first_words(error)}", hint) from error


def _first_words(error: Exception) -> str:
    """The first thing that torch lists, and not hundreds of parameters' names."""
    return shorten(" ".join(str(error).split()).partition(": ")[2] or str(error))


# The SHA-256 of models: two runs ended the same if these are equal, wherever the tensors lie.


_PIECE = 1 << 24  # elements: what is copied from a device at once


def hash_states(objects: Mapping[str, nn.Module]) -> str:
    """SHA-256 over every parameter and every saved buffer of the models, by `object.name` in sorted order.

    Each goes in with its name, dtype, shape and bytes. The device, the memory format and a DDP wrapper around the model
    or around a part of it make no difference; one bit of one number does. A collective where tensors are split: one at
    a time is whole.
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
