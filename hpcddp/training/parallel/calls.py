"""Whether the loop calls the DDP model itself, before each backward pass, and uses all of it.

Only then DDP averages the gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpcddp.errors import RequestError
from hpcddp.training.marks import Mark
from hpcddp.training.torch_compat import has_averaged

_SEARCH = "find_unused_parameters=True"


class ForwardCalls:
    """Notes which DDP models were called in a micro batch."""

    def __init__(self) -> None:
        self._called: set[int] = set()
        self._watched: list[DistributedDataParallel] = []
        self._trained: list[list[tuple[str, nn.Parameter]]] = []  # the parameters of each that DDP waits for
        self._held: list[set[int]] = []  # the ids of all parameters of each
        self._silent: set[int] = set()  # those called in `no_sync()` last
        self._unshared: set[int] = set()  # those whose last backward pass averaged nothing because of that
        self._spent: set[int] = set()  # those whose gradients were averaged since their last call

    def watch(self, model: nn.Module) -> None:
        """From now on its calls are noted, if it is a DDP model."""
        if not isinstance(model, DistributedDataParallel):
            return
        called, spent, silent = self._called, self._spent, self._silent

        def note(module: nn.Module, _inputs: Any) -> None:  # no method: deep copies of the model would copy its object
            if torch.is_grad_enabled():
                called.add(id(module))
                spent.discard(id(module))
                (silent.discard if module.require_backward_grad_sync else silent.add)(id(module))

        model.register_forward_pre_hook(note)
        self._watched.append(model)
        self._held.append({id(parameter) for parameter in model.module.parameters()})
        self._trained.append([(name, p) for name, p in model.module.named_parameters() if p.requires_grad])

    @property
    def watched(self) -> int:
        """How many DDP models there are."""
        return len(self._watched)

    def start(self) -> None:
        """A micro batch starts."""
        self._called.clear()
        self._spent.clear()
        self._silent.clear()
        self._unshared.clear()

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Around a backward pass. RequestError if it reaches a model that was not called, but the module inside it, or
        that was not called since the backward pass before."""
        if not self._watched:
            yield
            return
        before = [Mark(trained[0][1]) for trained in self._trained]
        with self._checked_inside():
            yield
        for model, mark in zip(self._watched, before, strict=True):
            if mark.holds():
                continue
            is_silent = id(model) in self._called and (id(model) in self._silent or not self._meets(model))
            (self._unshared.add if is_silent else self._unshared.discard)(id(model))
            if not self._meets(model):
                continue
            if id(model) in self._spent:
                raise RequestError(
                    f"rt.backward(loss) reached the {type(model.module).__name__} again since its last call: the ranks'"
                    " gradients would not be averaged",
                    "rt.backward(a + b), or each rt.backward right after its own model(x)",
                )
            if has_averaged(model):
                self._spent.add(id(model))

    def check_averaged(self, *, is_early: bool) -> None:
        """After the last backward pass of a step. RequestError if a model has parameters that it did not reach, or, in
        the first steps of an attempt, whose layers were replaced."""
        if self._unshared and len(self._watched) == 1:  # of several, one may be called so on purpose
            raise RequestError(
                "the model was called in model.no_sync(), or rt.backward(loss) came in it: the ranks' gradients were"
                " not averaged",
                "leave model.no_sync() out: the ranks average once per global batch, at its last micro batch",
            )
        for model, trained, held in zip(self._watched, self._trained, self._held, strict=True):
            if not self._meets(model):
                continue
            averaged = has_averaged(model)
            if is_early or not averaged:
                _check_replaced(model.module, trained, held)
            if averaged:
                continue
            kind = type(model.module).__name__
            frozen = next((name for name, p in trained if not p.requires_grad), None)
            if frozen is not None:
                raise RequestError(
                    f"{frozen} of {kind} requires no gradient, and did at rt.prepare: the ranks' gradients were not"
                    " averaged",
                    f"model = rt.wrap(model, {_SEARCH}), then rt.prepare(model, optimizer, loader); or"
                    " requires_grad_(False) before it, to freeze from the start",
                )
            unused = next((f"{name} has no gradient" for name, p in trained if p.grad is None), "one was left out")
            raise RequestError(
                f"rt.backward(loss) did not reach all parameters of the {kind}: {unused}, so the ranks' gradients were"
                " not averaged",
                f"model = rt.wrap(model, {_SEARCH}), then rt.prepare(model, optimizer, loader)",
            )

    def _meets(self, model: DistributedDataParallel) -> bool:
        """Whether the ranks average its gradients in this micro batch."""
        return id(model) in self._called and model.require_backward_grad_sync

    @contextmanager
    def _checked_inside(self) -> Iterator[None]:
        if len(self._called) >= len(self._watched):
            yield
            return
        missing = [model for model in self._watched if id(model) not in self._called]
        before = [[Mark(p) for p in model.parameters() if p.requires_grad] for model in missing]
        yield
        for model, marks in zip(missing, before, strict=True):
            if not all(mark.holds() for mark in marks):
                kind = type(model.module).__name__
                raise RequestError(
                    f"rt.backward(loss) reached the {kind}, but not through the model that rt.prepare returned: the"
                    " ranks' gradients would not be averaged",
                    "model, optimizer, loader = rt.prepare(model, optimizer, loader), then call model(x): not"
                    " model.module, rt.unwrap(model) or the old one",
                )


def _check_replaced(model: nn.Module, trained: Sequence[tuple[str, nn.Parameter]], held: set[int]) -> None:
    """RequestError if the model has other parameters in place of some that it held when it was wrapped."""
    now = {id(parameter) for parameter in model.parameters()}
    gone = next((name for name, parameter in trained if id(parameter) not in now), None)
    if gone is not None and not now <= held:
        raise RequestError(
            f"{gone} of the {type(model).__name__} was replaced after rt.prepare: the ranks' gradients of what came in"
            " its place would not be averaged",
            "change the layers of the model first, then make the optimizer from its parameters, then"
            " rt.prepare(model, optimizer, loader)",
        )
