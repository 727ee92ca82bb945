"""What acts once per pass over a global batch, at its last micro batch: optimizers, schedulers, scalers, averages.

The loop keeps its own calls, such as `optimizer.step()`. In the micro batches before the last one they do nothing. The
objects stay torch's; only the named methods of these instances are replaced, as torch's learning rate schedulers
replace `optimizer.step`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel

from hpcddp.errors import RequestError
from hpcddp.training.loop_view import LoopView
from hpcddp.training.own_gradients import OwnGradients
from hpcddp.training.parameters import KnownParameters
from hpcddp.training.replaced import replace, replace_in_class
from hpcddp.training.scaled import ScaledGradients
from hpcddp.training.torch_compat import has_scheduler


class StepGate:
    """All optimizers, schedulers and scalers of a run."""

    def __init__(self, loop: LoopView) -> None:
        self.optimizers: list[SeenOptimizer] = []
        self.scaled = ScaledGradients()
        self.known: KnownParameters | None = None  # as soon as all objects are taken
        self.scaling = False  # a scaler steps an optimizer, now
        self.asked = False  # for a step in this micro batch
        self.acted = False  # some optimizer in this global batch
        self.acts = False  # an optimizer, now
        self.reached = False  # some gradient an optimizer that acted in this global batch
        self._schedulers: list[LRScheduler] = []
        self._loop = loop
        self._taken: set[int] = set()

    def take(self, thing: Any) -> None:
        """From now on this object acts at the last micro batch only. Objects of other kinds stay alone."""
        if id(thing) in self._taken:
            return
        self._taken.add(id(thing))
        if isinstance(thing, Optimizer):
            seen = SeenOptimizer(thing, self, self._loop)
            self.optimizers.append(seen)
            replace(thing, "step", seen.step)
            replace(thing, "zero_grad", seen.zero_grad)
        elif isinstance(thing, LRScheduler):
            self._schedulers.append(thing)
            replace_in_class(thing, "step", self._if_last)
        elif isinstance(thing, AveragedModel):
            replace_in_class(thing, "update_parameters", self._if_last)
        elif isinstance(thing, GradScaler):
            self.scaled.scalers.append(thing)
            replace(thing, "scale", self.scaled.scale)
            replace(thing, "unscale_", functools.partial(self._unscale, thing))
            replace(thing, "step", functools.partial(self._step_scaled, thing))
            replace(thing, "update", self._if_last)

    def find(self, optimizer: Optimizer) -> SeenOptimizer | None:
        return next((seen for seen in self.optimizers if seen.optimizer is optimizer), None)

    @contextmanager
    def guarding(self, models: Sequence[nn.Module]) -> Iterator[None]:
        """Meanwhile RequestError if an optimizer that was not taken steps parameters of these models in the loop.

        It would step in each micro batch, and its state would be in no checkpoint.
        """
        known = {id(parameter) for model in models for parameter in model.parameters()}

        def look(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
            if self.acts or not self._loop.inside:  # one that steps another inside, such as ZeRO's
                return
            if any(id(parameter) in known for group in optimizer.param_groups for parameter in group["params"]):
                raise RequestError(
                    f"this {type(optimizer).__name__} steps a prepared model, and was not prepared itself",
                    "model, optimizer, loader = rt.prepare(model, optimizer, loader), with all optimizers",
                )

        handle = register_optimizer_step_pre_hook(look)
        try:
            yield
        finally:
            handle.remove()

    def check_schedulers(self) -> None:
        """RequestError if an optimizer's scheduler was not taken: a resumed run would begin its schedule anew."""
        for seen in self.optimizers:
            taken = any(scheduler.optimizer is seen.optimizer for scheduler in self._schedulers)
            if has_scheduler(seen.optimizer) and not taken:
                raise RequestError(
                    f"the {type(seen.optimizer).__name__} has a scheduler that was not prepared",
                    "model, optimizer, scheduler, loader = rt.prepare(model, optimizer, scheduler, loader)",
                )

    def _if_last(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if self._loop.acts else None

    def _unscale(
        self, scaler: GradScaler, original: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> Any:
        if not self._loop.acts:
            return None
        self._check_scaled(scaler)
        self._loop.collect()
        seen = self.find(optimizer)
        if seen is not None:
            seen.gradients.unscaled_at = self._loop.backwards
        return original(optimizer, *args, **kwargs)

    def _step_scaled(
        self, scaler: GradScaler, original: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> Any:
        self.asked = True
        if not self._loop.acts:
            return None
        self._check_scaled(scaler)
        self._loop.collect()
        seen = self.find(optimizer)
        if seen is not None:
            seen.gradients.check_cleared()
        self.scaling = True
        try:
            result = original(optimizer, *args, **kwargs)
        finally:
            self.scaling = False
        if seen is not None:
            seen.note_step()  # the scaler leaves a step out if a gradient is infinite
        return result

    def _check_scaled(self, scaler: GradScaler) -> None:
        if self._loop.inside:
            self.scaled.check_step_of(scaler, self._loop.backwards_before_pass)


class SeenOptimizer:
    """One optimizer: its `step` and `zero_grad`."""

    def __init__(self, optimizer: Optimizer, gate: StepGate, loop: LoopView) -> None:
        self.optimizer = optimizer
        self.gradients = OwnGradients(optimizer, loop)
        self.clear: Callable[[], None] = optimizer.zero_grad
        self._gate = gate
        self._loop = loop
        self._held = -1  # parameters, when they were looked at last
        self._frozen: list[nn.Parameter] = []  # of these, those that cannot be trained

    def step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._gate.asked = True
        if self._loop.inside and any(map(callable, (*args, *kwargs.values()))):
            raise RequestError(
                "optimizer.step(closure) is not supported: it evaluates one batch, perhaps several times, and a step"
                " here is that of the global batch",
                "rt.backward(loss); optimizer.step(), with an optimizer that needs no closure",
            )
        if not self._loop.acts:
            return None
        self._check_parameters()
        self._loop.collect()
        self.gradients.check_step()
        unscaled = self.gradients.unscaled_at == self._loop.backwards
        scaled = self._gate.scaled.are_scaled(self._loop.backwards) and not unscaled
        if self._loop.inside and scaled and not self._gate.scaling:
            raise RequestError(
                "optimizer.step() came with gradients which rt.backward(loss, scaler=scaler) has scaled",
                "rt.step(optimizer, scaler=scaler), or scaler.step(optimizer); scaler.update()",
            )
        self._gate.acts = True
        try:
            result = original(*args, **kwargs)
        finally:
            self._gate.acts = False
        self.note_step()
        return result

    def _check_parameters(self) -> None:
        """RequestError for parameters that came, or were unfrozen, after `rt.prepare`."""
        known, held = self._gate.known, sum(len(group["params"]) for group in self.optimizer.param_groups)
        if known is not None and held != self._held:
            self._held, self._frozen = held, known.find_frozen(self.optimizer)
        if known is not None and self._frozen:
            known.check_frozen(self._frozen)

    def note_step(self) -> None:
        """It has stepped."""
        self.gradients.note_step()
        self._gate.acted = True
        self._gate.reached |= self.gradients.stepped_with_some

    def zero_grad(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Acts unless that would drop what earlier micro batches of this pass brought."""
        if not self.gradients.are_partial():
            original(*args, **kwargs)
            self.gradients.note_cleared()


def step_all(
    optimizers: Sequence[Optimizer],
    scheduler: LRScheduler | None,
    clip_norm: float | None,
    scaler: GradScaler | None,
) -> None:
    """All that follows the last backward pass: unscale, clip, step, update, step the scheduler, clear the gradients."""
    if clip_norm is not None:
        if scaler is not None:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
        clip_grad_norm_([p for o in optimizers for group in o.param_groups for p in group["params"]], clip_norm)
    for optimizer in optimizers:
        if scaler is not None:
            scaler.step(optimizer)
        else:
            optimizer.step()
    if scaler is not None:
        scaler.update()
    if scheduler is not None:
        scheduler.step()
    for optimizer in optimizers:
        optimizer.zero_grad()
