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

from hpcddp.training.mistakes import (
    LAYER_REPLACED,
    LAYER_UNUSED,
    MODEL_TWICE,
    MODEL_UNWRAPPED,
    NO_SYNC,
)
from hpcddp.training.torch_compat import gradient_version, has_averaged, is_as_before


class ForwardCalls:
    """Notes which DDP models were called in a micro batch."""

    def __init__(self) -> None:
        self.are_watched = False  # whether there is a DDP model, so that the methods have something to do
        self._called: set[int] = set()
        self._watched: list[DistributedDataParallel] = []
        self._trained: list[list[tuple[str, nn.Parameter]]] = []  # the parameters of each that DDP waits for
        self._held: list[set[int]] = []  # the ids of all parameters of each
        self._silent: set[int] = set()  # those called in `no_sync()` last
        self._unshared: set[int] = set()  # those whose last backward pass averaged nothing because of that
        self._spent: set[int] = set()  # those whose gradients were averaged since their last call

    def watch(self, model: nn.Module) -> None:
        """Record the calls of this model from now on, if it is a DDP model."""
        if not isinstance(model, DistributedDataParallel):
            return
        called, spent, silent = self._called, self._spent, self._silent

        def note(module: nn.Module, _inputs: Any) -> None:  # no method: deep copies of the model would copy its object
            if torch.is_grad_enabled():
                called.add(id(module))
                spent.discard(id(module))
                (silent.discard if module.require_backward_grad_sync else silent.add)(id(module))

        model.register_forward_pre_hook(note)
        self.are_watched = True
        self._watched.append(model)
        self._held.append({id(parameter) for parameter in model.module.parameters()})
        self._trained.append([(name, p) for name, p in model.module.named_parameters() if p.requires_grad])

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
        is_only = len(self._watched) == 1 and id(self._watched[0]) in self._called  # then it is what the pass reaches
        before = [] if is_only else [gradient_version(trained[0][1]) for trained in self._trained]
        if is_only:
            yield
        else:
            with self._checked_inside():
                yield
        for nth, model in enumerate(self._watched):
            if before and is_as_before(self._trained[nth][0][1], before[nth]):
                continue
            called = id(model) in self._called
            meets = called and model.require_backward_grad_sync
            is_silent = called and (id(model) in self._silent or not meets)
            (self._unshared.add if is_silent else self._unshared.discard)(id(model))
            if not meets:
                continue
            if id(model) in self._spent:
                raise MODEL_TWICE.error(kind=type(model.module).__name__)
            if has_averaged(model):
                self._spent.add(id(model))

    def check_averaged(self, *, is_early: bool) -> None:
        """Check the models before a step. RequestError if one has parameters that the backward pass did not reach, or,
        in the first steps of an attempt, whose layers were replaced."""
        if self._unshared and len(self._watched) == 1:  # of several, one may be called so on purpose
            raise NO_SYNC.error()
        for model, trained, held in zip(self._watched, self._trained, self._held, strict=True):
            if id(model) not in self._called or not model.require_backward_grad_sync:
                continue
            averaged = id(model) in self._spent or has_averaged(model)
            if is_early or not averaged:
                _check_replaced(model.module, trained, held)
            if averaged:
                continue
            kind = type(model.module).__name__
            frozen = (f"{name} requires none any more" for name, p in trained if not p.requires_grad)
            unused = (f"{name} has no gradient" for name, p in trained if p.grad is None)
            raise LAYER_UNUSED.error(kind=kind, name=[*frozen, *unused, "one was left out"][0])

    @contextmanager
    def _checked_inside(self) -> Iterator[None]:
        missing = [model for model in self._watched if id(model) not in self._called]
        held = [[p for p in model.parameters() if p.requires_grad] for model in missing]
        before = [[gradient_version(p) for p in parameters] for parameters in held]
        yield
        for model, parameters, looks in zip(missing, held, before, strict=True):
            if not all(map(is_as_before, parameters, looks)):
                raise MODEL_UNWRAPPED.error(kind=type(model.module).__name__)


def _check_replaced(model: nn.Module, trained: Sequence[tuple[str, nn.Parameter]], held: set[int]) -> None:
    """RequestError if the model has other parameters in place of some that it held when it was wrapped."""
    now = {id(parameter) for parameter in model.parameters()}
    gone = next((name for name, parameter in trained if id(parameter) not in now), None)
    if gone is not None and not now <= held:
        raise LAYER_REPLACED.error(name=gone, kind=type(model).__name__)
