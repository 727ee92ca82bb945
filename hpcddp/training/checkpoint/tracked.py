"""What a checkpoint holds, and bringing it back. Nothing in it depends on the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hpcddp.errors import RequestError
from hpcddp.training.checkpoint.fingerprint import hash_states
from hpcddp.training.checkpoint.owned_states import OwnedStates
from hpcddp.training.checkpoint.same_objects import describe_groups
from hpcddp.training.checkpoint.state_tree import is_split, load_module_state, module_state
from hpcddp.training.torch_compat import uncompiled
from hpcddp.units import shorten


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
        # now: in a forward pass a sharded model has other parameters
        self.groups = describe_groups(self.objects, self.owned.join)

    def models(self) -> list[nn.Module]:
        return [thing for thing in self.objects.values() if isinstance(thing, nn.Module)]

    def is_split(self) -> bool:
        """Whether ranks hold shards, or stages, of a model only.

        The state says it: after an evaluation the parameters are whole until the next pass, and `state_dict()` shards
        them again.
        """
        return self.owned.is_partial or any(
            is_split(value) for model in self.models() for value in model.state_dict().values()
        )

    def hash_weights(self, *, gather: bool = False) -> str | None:
        """SHA-256 of all models, averaged weights (EMA) included, as they are on this rank: see `hash_states`.

        Where ranks hold parts only, None; or with `gather`, which makes it a collective, that of the whole.
        """
        if not gather and self.is_split():
            return None
        return hash_states({name: thing for name, thing in self.objects.items() if isinstance(thing, nn.Module)})

    def learning_rate(self) -> float | None:
        """Of the first parameter group of the first optimizer."""
        optimizers = (thing for thing in self.objects.values() if isinstance(thing, Optimizer))
        return next((float(optimizer.param_groups[0]["lr"]) for optimizer in optimizers), None)

    def capture(self) -> dict[str, Any]:
        """Every object's state by name, with the run's own tensors in it, not copies."""
        states = {
            name: module_state(thing) if isinstance(thing, nn.Module) else thing.state_dict()
            for name, thing in self.objects.items()
        }
        return self.owned.lift(states)

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
                numbered = [(self.owned.number(name, n), p) for n, p in enumerate(parameters)]
                likes |= {(name, "state", n): p.detach() for n, p in numbered if is_split(p)}

        def find(path: tuple[Any, ...], shape: torch.Size) -> Any:
            like = likes.get(path[:2], likes.get(path[:3]))
            return like if like is not None and like.shape == shape else None

        return find

    def restore_models(self, tree: dict[str, Any], source: str, hint: str) -> None:
        """Load every model's state. RequestError, which names the `source`, if one does not fit."""
        for name, thing in self.objects.items():
            if isinstance(thing, nn.Module):
                with _fitting(f"{source} does not fit {name} ({type(thing).__name__})", hint):
                    load_module_state(thing, tree[name])

    def restore_others(self, tree: dict[str, Any], source: str, hint: str) -> None:
        """The same for every other object."""
        tree = self.owned.lower(tree)
        for name, thing in self.objects.items():
            if not isinstance(thing, nn.Module):
                with _fitting(f"{source} does not fit {name} ({type(thing).__name__})", hint):
                    thing.load_state_dict(tree[name])


@contextmanager
def _fitting(what: str, hint: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError, KeyError, TypeError) as error:  # torch's words for: another shape
        raise RequestError(f"{what}: {_first_words(error)}", hint) from error


def _first_words(error: Exception) -> str:
    """The first thing that torch lists, and not hundreds of parameters' names."""
    return shorten(" ".join(str(error).split()).partition(": ")[2] or str(error))
