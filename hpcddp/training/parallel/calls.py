"""Whether the loop calls the DDP model itself: only then DDP averages the gradients of the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpcddp.errors import RequestError
from hpcddp.training.torch_compat import version_of


class ForwardCalls:
    """Notes which DDP models were called in a micro batch."""

    def __init__(self) -> None:
        self._called: set[int] = set()
        self._watched: list[DistributedDataParallel] = []

    def watch(self, model: nn.Module) -> None:
        """From now on its calls are noted, if it is a DDP model."""
        if not isinstance(model, DistributedDataParallel):
            return
        called = self._called

        def note(module: nn.Module, _inputs: Any) -> None:  # no method: deep copies of the model would copy its object
            if torch.is_grad_enabled():
                called.add(id(module))

        model.register_forward_pre_hook(note)
        self._watched.append(model)

    def start(self) -> None:
        """A micro batch starts."""
        self._called.clear()

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Around a backward pass. RequestError if it reaches a model that was not called, but the module inside it."""
        if len(self._called) >= len(self._watched):
            yield
            return
        missing = [model for model in self._watched if id(model) not in self._called]
        before = [_mark(model) for model in missing]
        yield
        for model, marks in zip(missing, before, strict=True):
            if _mark(model) != marks:
                kind = type(model.module).__name__
                raise RequestError(
                    f"rt.backward(loss) reached the {kind}, but not through the model that rt.prepare returned: the"
                    " ranks' gradients would not be averaged",
                    "model = rt.prepare(model), then call model(x): not model.module, rt.unwrap(model) or the old one",
                )


def _mark(model: nn.Module) -> list[int | None]:
    """Of each parameter's gradient a number that each change in place raises."""
    return [None if p.grad is None else version_of(p.grad) for p in model.parameters() if p.requires_grad]
