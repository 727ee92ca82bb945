"""What acts once per pass over a global batch, at its last micro batch: optimizers, schedulers, scalers, averages.

The loop keeps its own calls, such as `optimizer.step()`. In the micro batches before the last one they do nothing. The
objects stay torch's; only the named methods of these instances are replaced, as torch's learning rate schedulers
replace `optimizer.step`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.amp import GradScaler
from torch.nn import Module
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from hpcddp.errors import RequestError
from hpcddp.training.gate.loop_view import LoopView
from hpcddp.training.gate.nested import keep_groups_shared
from hpcddp.training.gate.optimizers import OptimizerSteps, SeenOptimizer
from hpcddp.training.gate.own_steps import watch_steps
from hpcddp.training.gate.replaced import replace, replace_in_class
from hpcddp.training.gate.scalers import SeenScaler


class StepGate(OptimizerSteps):
    """All optimizers, schedulers and scalers of a run, which act at the last micro batch only."""

    def __init__(self, loop: LoopView) -> None:
        super().__init__()
        self.schedulers: list[LRScheduler] = []
        self._loop = loop
        self.is_in_backward = False  # that of `rt.backward`
        self.is_first = True  # whether this rank prints warnings
        self._taken: set[int] = set()
        self._undo: list[Callable[[], None]] = []  # what was done to the objects

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
            self._replace(thing, "step", seen.step)
            self._replace(thing, "zero_grad", seen.zero_grad)
        elif isinstance(thing, LRScheduler):
            self.schedulers.append(thing)
            self._replace_in_class(thing, "step", partial(self._if_last, thing, "step"))
        elif isinstance(thing, AveragedModel):
            act = partial(self._if_last, thing, "update_parameters")
            self._replace_in_class(thing, "update_parameters", act)
        elif isinstance(thing, GradScaler):
            self.scaled.scalers.append(thing)
            seen_scaler = SeenScaler(thing, self, self._loop)
            self._replace(thing, "scale", self.scaled.scale)
            self._replace(thing, "unscale_", seen_scaler.unscale)
            self._replace(thing, "step", seen_scaler.step)
            self._replace(thing, "update", seen_scaler.update)
            self._replace(thing, "get_scale", seen_scaler.get_scale)
        elif not isinstance(thing, Module) and callable(getattr(type(thing), "step", None)):
            self._undo.append(watch_steps(thing, self._loop, is_first=self.is_first))

    def has_taken(self, thing: object) -> bool:
        """Whether this object acts at the last micro batch only."""
        return id(thing) in self._taken

    def let_go(self) -> None:
        """The run is over, however it ended: the objects act as they did before."""
        while self._undo:
            self._undo.pop()()

    def _replace(self, thing: Any, name: str, method: Callable[..., Any]) -> None:
        self._undo.append(replace(thing, name, method))

    def _replace_in_class(self, thing: Any, name: str, method: Callable[..., Any]) -> None:
        self._undo.append(replace_in_class(thing, name, method))

    def backward_starts(self, *, scaled: bool) -> None:
        """A backward pass comes, with a gradient scaler or without."""
        self.is_in_backward = True
        for seen in self.optimizers:
            seen.gradients.expect_backward(alone=len(self.optimizers) == 1)
            if scaled and len(self.optimizers) > 1:
                seen.gradients.expect_scaled()

    def backward_ends(self, *, scaled: bool) -> None:
        """It is over, and counted."""
        self.is_in_backward = False
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

    def note_early(self, optimizers: Sequence[Optimizer], scheduler: LRScheduler | None) -> None:
        """`rt.step` was called for these before the last micro batch."""
        self.asked = True
        for optimizer in optimizers:
            self.calls.note_early(optimizer, "step", is_optimizer=True)
        if scheduler is not None:
            self.calls.note_early(scheduler, "step")

    def check_calls(self) -> None:
        """The global batch is over. RequestError for a call that was made in other micro batches only.

        A scheduler and an average may follow a step that was left out: on purpose, or by a gradient scaler.
        """
        may_skip = bool(self.skipped) or any(scaler.is_enabled() for scaler in self.scaled.scalers)
        self.calls.check(optimizers_only=may_skip)

    def _if_last(self, thing: object, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not (self._loop.acts or self._loop.is_left):
            self.calls.note_early(thing, name)
            return None
        self.calls.note_acted(thing)
        return original(*args, **kwargs)


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
