"""What acts once per pass over a global batch, at its last micro batch: optimizers, schedulers, scalers, averages.

The loop keeps its own calls, such as `optimizer.step()`. In the micro batches before the last one they do nothing. The
objects stay torch's; only the named methods of these instances are replaced, as torch's learning rate schedulers
replace `optimizer.step`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from hpcddp.errors import RequestError
from hpcddp.training.gate.loop_view import LoopView
from hpcddp.training.gate.nested import find_outer, keep_groups_shared
from hpcddp.training.gate.own_gradients import OwnGradients
from hpcddp.training.gate.parameters import KnownParameters
from hpcddp.training.gate.replaced import replace, replace_in_class
from hpcddp.training.gate.scaled import ScaledGradients
from hpcddp.training.torch_compat import note_steps

_EITHER = "if norm.isfinite(): optimizer.step(); else: rt.skip_step(), or rt.skip_step(optimizer) for one of several"


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
        self.stepped: set[int] = set()  # optimizers that have stepped in this global batch, by id
        self.skipped: set[int] = set()  # those whose step was left out on purpose
        self.scale_read_at = -1  # backward passes before the script asked a scaler for its scale
        self.schedulers: list[LRScheduler] = []
        self._loop = loop
        self._taken: set[int] = set()

    def take(self, thing: Any) -> None:
        """From now on this object acts at the last micro batch only. Objects of other kinds stay alone."""
        if id(thing) in self._taken:
            return
        self._taken.add(id(thing))
        if isinstance(thing, Optimizer):
            for other in self.optimizers:
                if other.optimizer.param_groups is thing.param_groups:
                    keep_groups_shared(thing, other.optimizer)
            seen = SeenOptimizer(thing, self, self._loop)
            self.optimizers.append(seen)
            replace(thing, "step", seen.step)
            replace(thing, "zero_grad", seen.zero_grad)
        elif isinstance(thing, LRScheduler):
            self.schedulers.append(thing)
            replace_in_class(thing, "step", self._if_last)
        elif isinstance(thing, AveragedModel):
            replace_in_class(thing, "update_parameters", self._if_last)
        elif isinstance(thing, GradScaler):
            self.scaled.scalers.append(thing)
            replace(thing, "scale", self.scaled.scale)
            replace(thing, "unscale_", functools.partial(self._unscale, thing))
            replace(thing, "step", functools.partial(self._step_scaled, thing))
            replace(thing, "update", functools.partial(self._update, thing))
            replace(thing, "get_scale", self._get_scale)

    def batch_starts(self) -> None:
        """The loop gets the first micro batch of a global batch."""
        self.acted = self.reached = False
        self.stepped.clear()
        self.skipped.clear()

    def backward_starts(self, *, scaled: bool) -> None:
        """A backward pass comes, with a gradient scaler or without."""
        for seen in self.optimizers:
            seen.gradients.look()
            if scaled and len(self.optimizers) > 1:
                seen.gradients.expect_scaled()

    def backward_ends(self, *, scaled: bool) -> None:
        """It is over, and counted."""
        for seen in self.optimizers:
            seen.gradients.note_backward()
            if scaled:
                seen.gradients.note_scaled()

    def skip(self, optimizers: Sequence[Optimizer]) -> bool:
        """Leave the step of these optimizers out, or of all. Acts as a step does; returns whether it did."""
        found = [self._need(optimizer) for optimizer in optimizers] or self.optimizers
        self.asked = True
        if not self._loop.acts:
            return False
        for seen in found:
            seen.check_not_stepped()
        self._loop.collect()
        for seen in found:
            seen.skip()
        return True

    def _need(self, optimizer: Optimizer) -> SeenOptimizer:
        seen = self.find(optimizer)
        if seen is None:
            raise RequestError(
                f"rt.skip_step was given a {type(optimizer).__name__} that was not prepared",
                "model, optimizer, loader = rt.prepare(model, optimizer, loader), then rt.skip_step(optimizer)",
            )
        return seen

    def find(self, optimizer: Optimizer) -> SeenOptimizer | None:
        return next((seen for seen in self.optimizers if seen.optimizer is optimizer), None)

    def _if_last(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if self._loop.acts else None

    def _get_scale(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.scale_read_at = self._loop.backwards
        return original(*args, **kwargs)

    def _update(self, scaler: GradScaler, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._loop.acts:
            return None
        result = original(*args, **kwargs)
        self.scaled.note_update(scaler, self._loop.backwards)
        return result

    def _unscale(
        self, scaler: GradScaler, original: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> Any:
        if not self._loop.acts:
            return None
        seen = self.find(optimizer)
        if seen is not None:
            seen.check_scaled(scaler)
        self._loop.collect()
        if seen is not None:
            seen.gradients.unscaled_at = self._loop.backwards
            self.scaled.note_use(scaler, optimizer, self._loop.backwards)
        return original(optimizer, *args, **kwargs)

    def _step_scaled(
        self, scaler: GradScaler, original: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> Any:
        self.asked = True
        if not self._loop.acts:
            return None
        seen = self.find(optimizer)
        if seen is not None:
            seen.check_scaled(scaler)
        self._loop.collect()
        self.scaling = True
        try:
            result = original(optimizer, *args, **kwargs)
        finally:
            self.scaling = False
        if seen is not None:
            seen.note_step()  # the scaler leaves a step out if a gradient is infinite
            note_steps(optimizer)  # so its scheduler may step before it does, which torch warns of
            self.scaled.note_use(scaler, optimizer, self._loop.backwards)
        return result


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
                "rt.backward(loss); optimizer.first_step(zero_grad=True); rt.backward(loss_fn(model(x), y));"
                " optimizer.second_step(zero_grad=True)"
                if hasattr(self.optimizer, "second_step")
                else "rt.backward(loss); optimizer.step(), with an optimizer that needs no closure",
            )
        if self._loop.accumulates and not self._gate.acts:
            self._check_outer()
        if not self._loop.acts:
            return None
        self._check_parameters()
        self._loop.collect()
        self._check_not_skipped()
        self.gradients.check_step()
        if self._loop.inside and not self._gate.scaling and self.gradients.are_scaled(self._gate.scale_read_at):
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

    def _check_outer(self) -> None:
        """RequestError if this belongs to another optimizer, such as one for SAM, which acts between its steps."""
        outer = find_outer(self.optimizer, [seen.optimizer for seen in self._gate.optimizers])
        if outer is not None:
            raise RequestError(
                f"the {outer[0]} has this {type(self.optimizer).__name__} step, and a global batch has several micro"
                f" batches here: what the {outer[0]} does before would be done in each of them",
                "hpcddp.runtime(max_micro_batch=N), where N samples are a rank's whole share of the global batch",
            )

    def _check_parameters(self) -> None:
        """RequestError for parameters that came, or were unfrozen, after `rt.prepare`."""
        known, held = self._gate.known, sum(len(group["params"]) for group in self.optimizer.param_groups)
        if known is not None and held != self._held:
            self._held, self._frozen = held, known.find_frozen(self.optimizer)
        if known is not None and self._frozen:
            known.check_frozen(self._frozen)

    def check_scaled(self, scaler: GradScaler) -> None:
        """RequestError if it cannot step with this scaler."""
        self._check_not_skipped()
        self.gradients.check_cleared()
        if scaler.is_enabled():
            self.gradients.check_scaled()
            if self._loop.inside and not self.gradients.were_stepped_on:
                self._gate.scaled.check_updates(scaler, self.optimizer, self.gradients.scaled_at)

    def check_not_stepped(self) -> None:
        """RequestError if it has stepped in this global batch."""
        if id(self) in self._gate.stepped:
            raise RequestError(f"rt.skip_step() came after the {type(self.optimizer).__name__} had stepped", _EITHER)

    def _check_not_skipped(self) -> None:
        if id(self) in self._gate.skipped:
            raise RequestError("optimizer.step() came after rt.skip_step() in one global batch", _EITHER)

    def skip(self) -> None:
        """Leave this step out: the gradients are dropped, and the batch counts."""
        self._note_done()
        self._gate.skipped.add(id(self))
        note_steps(self.optimizer)  # a scheduler may step, as after a step that a gradient scaler leaves out
        self.clear()
        self.gradients.note_cleared()

    def note_step(self) -> None:
        """It has stepped."""
        self._note_done()
        self._gate.stepped.add(id(self))

    def _note_done(self) -> None:
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
