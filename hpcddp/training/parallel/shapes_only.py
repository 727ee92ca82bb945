"""What a model computes outside of a rank's stage: shapes only, by torch's device "meta".

Torch mixes such tensors with real ones in some of its functions, and gives numbers that mean nothing. Here that is an
error, but where a rank passes over another stage: what it computes there is shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hpcddp.errors import RequestError

CHAIN = (
    "begin the stages where the model is a chain: what one stage computes reaches the next as an argument of the module"
    " that this begins with, and layers are made in the order in which they compute"
)


def map_tensors(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same nested tuples, lists and dicts with each tensor changed, in their order."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: map_tensors(value, change) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(value, change) for value in tree))
    if type(tree) in (list, tuple):
        return type(tree)(map_tensors(value, change) for value in tree)
    return tree


def list_tensors(tree: Any) -> list[Tensor]:
    """The tensors of nested tuples, lists and dicts, in their order."""
    return [*_walk(tree)]


def _walk(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _walk(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _walk(value)


class ShapesApart(TorchFunctionMode):
    """Keeps shapes and numbers apart. With `passes_over` a function of both gives shapes; else it is refused."""

    passes_over = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        kinds = {tensor.is_meta for tensor in _walk((args, kwargs))}
        if len(kinds) > 1:
            name = getattr(func, "__name__", str(func))
            if not self.passes_over or _changes_numbers(name, args):
                raise RequestError(
                    f"{name} takes what this stage of the pipeline computes together with what another one has", CHAIN
                )
            args, kwargs = map_tensors((args, kwargs), lambda tensor: tensor.to(torch.device("meta")))
        return func(*args, **kwargs)


def _changes_numbers(name: str, args: tuple[Any, ...]) -> bool:
    """Whether the function writes shapes into a tensor of numbers."""
    in_place = name == "__setitem__" or (name.startswith("__i") and name != "__invert__")
    in_place |= name.endswith("_") and not name.endswith("__")
    return in_place and bool(args) and isinstance(args[0], Tensor) and not args[0].is_meta
