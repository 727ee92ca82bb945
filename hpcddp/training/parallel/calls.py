"""Whether the loop calls the DDP model itself, before each backward pass, and uses all of it.

Only then DDP averages the gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpcddp.training.mistakes import LAYER_UNUSED, MODEL_TWICE, MODEL_UNWRAPPED
from hpcddp.training.torch_compat import gradient_version, has_averaged, is_as_before


@dataclass(eq=False)
class _WatchedModel:
    """A DDP model in the micro batch that the loop is at."""

    model: DistributedDataParallel
    trained: list[tuple[str, nn.Parameter]]  # those that DDP waits for
    is_called: bool = False
    has_averaged: bool = False  # since its last call

    @property
    def kind(self) -> str:
        return type(self.model.module).__name__


class ForwardCalls:
    """Records which DDP models were called in a micro batch."""

    def __init__(self) -> None:
        self.are_watched = False  # whether there is a DDP model, so that the methods have something to do
        self._watched: list[_WatchedModel] = []

    def watch(self, model: nn.Module) -> None:
        """Record the calls of this model from now on, if it is a DDP model."""
        if not isinstance(model, DistributedDataParallel):
            return
        one = _WatchedModel(model, [(name, p) for name, p in model.module.named_parameters() if p.requires_grad])

        def note(module: nn.Module, _inputs: Any) -> None:  # a deep copy of the model has it, too
            if torch.is_grad_enabled() and module is one.model:
                one.is_called, one.has_averaged = True, False

        model.register_forward_pre_hook(note)
        self.are_watched = True
        self._watched.append(one)

    def start(self) -> None:
        """A micro batch starts."""
        for one in self._watched:
            one.is_called = one.has_averaged = False

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Around a backward pass. RequestError if it reaches a model that was not called, but the module inside it, or
        that was not called since the backward pass before."""
        is_only = len(self._watched) == 1 and self._watched[0].is_called  # then it is what the pass reaches
        before = [[gradient_version(p) for _, p in one.trained if not is_only] for one in self._watched]
        yield
        for one, versions in zip(self._watched, before, strict=True):
            parameters = (p for _, p in one.trained)
            if not is_only and all(map(is_as_before, parameters, versions)):
                continue
            if not one.is_called:
                raise MODEL_UNWRAPPED.error(kind=one.kind)
            if one.has_averaged:
                raise MODEL_TWICE.error(kind=one.kind)
            one.has_averaged = one.model.require_backward_grad_sync and has_averaged(one.model)

    def check_averaged(self) -> None:
        """Check the models before a step. RequestError if one has parameters that the backward pass did not reach."""
        for one in self._watched:
            averages = one.is_called and one.model.require_backward_grad_sync
            if not averages or one.has_averaged or has_averaged(one.model):
                continue
            frozen = (f"{name} requires none any more" for name, p in one.trained if not p.requires_grad)
            unused = (f"{name} has no gradient" for name, p in one.trained if p.grad is None)
            raise LAYER_UNUSED.error(kind=one.kind, name=[*frozen, *unused, "one was left out"][0])
