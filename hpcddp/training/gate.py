"""What acts once per pass over a global batch, at its last micro batch: optimizers, schedulers, scalers, averages.

The loop keeps its own calls, such as `optimizer.step()`. In the micro batches before the last one they do nothing. The
objects stay torch's; only the named methods of these instances are replaced, as torch's learning rate schedulers
replace `optimizer.step`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel

from hpcddp.errors import RequestError
from hpcddp.training.parameters import KnownParameters
from hpcddp.training.replaced import replace, replace_in_class
from hpcddp.training.scaled import ScaledGradients
from hpcddp.training.torch_compat import has_scheduler, version_of


class LoopView(Protocol):
    """What the gate sees of the training loop: where it is in its global batch."""

    @property
    def inside(self) -> bool:
        """Whether the loop has taken a batch and its step has not ended."""

    @property
    def acts(self) -> bool:
        """Whether this is the last micro batch of a pass, or no micro batch at all."""

    @property
    def accumulates(self) -> bool:
        """Whether the pass over this global batch has several micro batches, and the loop is in one of them."""

    @property
    def backwards(self) -> int:
        """Backward passes since the start of the attempt."""

    @property
    def backwards_before_pass(self) -> int:
        """The same when this pass over the global batch began."""

    def collect(self) -> None:
        """Make the gradient of the global batch, if that was not done yet."""


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
            seen.unscaled_at = self._loop.backwards
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
            seen.check_cleared()
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
    """One optimizer, and what it has done."""

    def __init__(self, optimizer: Optimizer, gate: StepGate, loop: LoopView) -> None:
        self.optimizer = optimizer
        self._gate = gate
        self._loop = loop
        self._stepped_at = -1  # backward passes before its last step
        self._zeroed = True  # since then
        self._stepped_with: tuple[nn.Parameter, int] | None = None  # a parameter, and the version of its gradient
        self._held = -1  # parameters, when they were looked at last
        self._frozen: list[nn.Parameter] = []  # of these, those that cannot be trained
        self.unscaled_at = -1  # backward passes before a scaler unscaled its gradients
        self._cleared_at = -1  # backward passes before its gradients were cleared between backward and step
        self._left: tuple[int, int] | None = None  # the first gradient that this left
        self.clear: Callable[[], None] = optimizer.zero_grad

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
        used = max(self._stepped_at, self._loop.backwards_before_pass)
        if self._loop.inside and self._loop.backwards == used:
            raise RequestError(
                "optimizer.step() came without a new rt.backward(loss) since its last one",
                "rt.backward(loss) in place of loss.backward(), then optimizer.step() once",
            )
        if self._loop.inside and not self._zeroed:
            raise RequestError(
                "optimizer.step() came with the gradients of the step before still in the sum",
                "optimizer.zero_grad() in each step",
            )
        self.check_cleared()
        scaled = self._gate.scaled.are_scaled(self._loop.backwards) and self.unscaled_at != self._loop.backwards
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
        self._stepped_at = self._loop.backwards
        self._zeroed = False
        self._stepped_with = next(((p, version_of(p.grad)) for p in self._parameters() if p.grad is not None), None)
        self._gate.acted = True
        self._gate.reached |= self._stepped_with is not None

    def zero_grad(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Acts unless that would drop what earlier micro batches of this pass brought."""
        began = self._loop.backwards_before_pass
        if self._loop.accumulates and self._loop.backwards > began and self._stepped_at <= began:
            return
        self._zeroed = True
        original(*args, **kwargs)
        if self._loop.inside and self._loop.backwards > max(began, self._stepped_at):  # between backward and step
            self._cleared_at, self._left = self._loop.backwards, self._first_gradient()

    def check_cleared(self) -> None:
        """RequestError if its gradients were cleared after the last backward pass, and nothing else was put there."""
        if self._loop.inside and self._cleared_at == self._loop.backwards and self._left == self._first_gradient():
            raise RequestError(
                "optimizer.step() came after the gradients of rt.backward(loss) were cleared",
                "optimizer.zero_grad() before rt.backward(loss), or after optimizer.step()",
            )

    def look(self) -> None:
        """Note that the gradients were cleared or set to zero by other means, such as `model.zero_grad()`.

        What it reads costs nothing: a gradient's version changes with each change in place.
        """
        if not self._zeroed and self._stepped_with is not None:
            parameter, version = self._stepped_with
            self._zeroed = parameter.grad is None or version_of(parameter.grad) != version

    def note_backward(self) -> None:
        """A backward pass has changed the gradients: that did not clear those of the step before."""
        if not self._zeroed and self._stepped_with is not None:
            parameter, _ = self._stepped_with
            if parameter.grad is not None:
                self._stepped_with = parameter, version_of(parameter.grad)

    def _first_gradient(self) -> tuple[int, int] | None:
        """The first gradient that there is, and its version."""
        gradient = next((p.grad for p in self._parameters() if p.grad is not None), None)
        return None if gradient is None else (id(gradient), version_of(gradient))

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for group in self.optimizer.param_groups for parameter in group["params"])


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
