"""State of each optimizer's gradients: none, of one batch, or stepped on; and the table of what a step may do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpcddp.training.mistakes import LAYER_UNFROZEN, PARAMETERS_FOREIGN, STEP_AGAIN, STEP_ON_CLEARED, STEP_ON_SEVERAL
from hpcddp.training.torch_compat import GradientVersion, gradient_version, is_as_before, local_part

_MOST_LOOKED_AT = 256  # parameters of an optimizer, where several optimizers share the backward passes


class GradientState(Enum):
    """State of the gradients of one optimizer's parameters."""

    NONE = "none came since they were cleared"
    WHOLE = "that of one batch"
    SEVERAL = "those of several batches: nothing has stepped on the earlier ones, or cleared them"
    USED = "the optimizer has stepped on them"


# what a step on such gradients is; None: right
STEP = {
    GradientState.NONE: STEP_AGAIN,
    GradientState.WHOLE: None,
    GradientState.SEVERAL: STEP_ON_SEVERAL,
    GradientState.USED: STEP_AGAIN,
}


class KnownParameters:
    """The parameters of the prepared models: only these are the same on all ranks.

    `fixed`: whether only those that require a gradient now can be trained, as where DDP or an exact run sums gradients.
    """

    def __init__(self, models: Sequence[nn.Module], *, fixed: bool) -> None:
        named = [(f"{name} of {type(model).__name__}", p) for model in models for name, p in model.named_parameters()]
        self.all = {id(parameter) for _, parameter in named}
        self.frozen = {id(p): name for name, p in named if fixed and not p.requires_grad}


class OptimizerGradients:
    """Gradients of one optimizer of the run."""

    def __init__(self, optimizer: Optimizer, known: KnownParameters) -> None:
        self.optimizer = optimizer
        self.state = GradientState.NONE
        self._batch = 0  # the last whose gradient is in the sum
        self._known = known
        self._held = -1  # parameters, when they were looked at last
        self._frozen: list[Tensor] = []
        self._chosen: list[Tensor] = []  # parameters that are looked at, where there are several optimizers
        self._smallest: Any = None  # parameter
        self._one: Tensor | None = None  # a parameter that the last backward pass has reached
        self._left: GradientVersion = (None, 0)  # its gradient, as the last backward pass left it
        self._marked: tuple[Tensor, GradientVersion] | None = None
        self._before: list[GradientVersion] | None = None  # gradients before the pass; None: it reaches this optimizer
        self._unsure = 0  # the last batch of which it is not known whether it reached one that is not looked at
        self.check_parameters()

    @property
    def kind(self) -> str:
        return type(self.optimizer).__name__

    @property
    def parameters(self) -> list[Any]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def check_parameters(self) -> None:
        """RequestError for parameters that came, or were unfrozen, after `rt.prepare`."""
        held = 0
        for group in self.optimizer.param_groups:
            held += len(group["params"])
        if held != self._held:
            parameters = self.parameters
            foreign = sum(id(parameter) not in self._known.all for parameter in parameters)
            if foreign:
                raise PARAMETERS_FOREIGN.error(count=foreign, kind=self.kind)
            self._held, self._frozen = held, [p for p in parameters if id(p) in self._known.frozen]
            stride = -(-held // _MOST_LOOKED_AT) or 1
            self._chosen = parameters[::stride]
            self._smallest = min(parameters, key=Tensor.numel)
        for parameter in self._frozen:
            if parameter.requires_grad:
                raise LAYER_UNFROZEN.error(name=self._known.frozen[id(parameter)])

    def expect_batch(self, batch: int) -> None:
        """A backward pass over this batch comes: what is left of those before?"""
        if self.state in (GradientState.WHOLE, GradientState.SEVERAL):
            if self._are_cleared():
                self.state = GradientState.NONE
            elif self._batch != batch:
                self.state = GradientState.SEVERAL

    def _are_cleared(self) -> bool:
        if self._one is None or self._one.grad is None:
            return True
        if is_as_before(self._one, self._left):
            return False
        return _is_zero(self._one.grad)  # zero_grad(set_to_none=False), or clipped and kept

    def expect_backward(self, *, alone: bool) -> None:
        """Prepare for a backward pass. `alone`: it reaches this optimizer, for the run has no other."""
        self._before = None if alone else [gradient_version(parameter) for parameter in self._chosen]

    def note_backward(self, batch: int) -> None:
        """Record that the last backward pass is over: the gradients are those of the whole batch."""
        if self._before is not None:
            pairs = zip(self._chosen, self._before, strict=True)
            reached = next((parameter for parameter, look in pairs if not is_as_before(parameter, look)), None)
            if reached is None:
                self._unsure = batch if len(self._chosen) < self._held else 0
                return
            self._one = reached
        self.look()
        if self._one is None:
            return
        if self.state is not GradientState.SEVERAL:
            self.state = GradientState.WHOLE
        self._batch = batch

    def look(self) -> None:
        """Note the gradient so far, of one parameter that has one."""
        if self._one is None or self._one.grad is None:
            found = (one for one in (*self._chosen, *self.parameters) if one.grad is not None)
            self._one = next(found, None)
        self._left = gradient_version(self._one) if self._one is not None else (None, 0)

    def were_changed(self) -> bool:
        """Whether the gradient so far was cleared, or changed in place. Another tensor is no change: DDP puts one there
        when it lays its buckets out anew."""
        return (
            self._one is not None and self._left[0] is not None and _is_changed(self._left, gradient_version(self._one))
        )

    def mark(self) -> None:
        """The gradients from before a pass were set aside: until the first backward pass a zero takes the place of one,
        and shows whether the loop clears it."""
        one = self._smallest
        if one.requires_grad and one.grad is None:
            one.grad = torch.zeros_like(one)
            self._marked = one, gradient_version(one)

    def unmark(self) -> bool:
        """Take the mark away. Returns whether it was cleared or changed."""
        marked, self._marked = self._marked, None
        if marked is None:
            return False
        one, before = marked
        now, one.grad = gradient_version(one), None
        return _is_changed(before, now)

    def check_step(self, batch: int, is_reached: Callable[[], bool], *, has_closure: bool) -> None:
        """RequestError if the optimizer cannot step on them. With a closure they come inside of the step. `is_reached`:
        whether a backward pass over this batch has reached some optimizer of the run."""
        self.check_parameters()
        if has_closure:
            return
        row = STEP[self.state]
        if row is STEP_AGAIN and (self._unsure == batch or (is_reached() and self._have_none())):
            return  # it may have no part in this batch: as in one process, a step on nothing
        if row is not None:
            raise row.error(kind=self.kind)
        if self._one is not None and self._one.grad is None and self._have_none():
            raise STEP_ON_CLEARED.error(kind=self.kind)

    def _have_none(self) -> bool:
        """Whether no parameter has a gradient other than zero."""
        return all(parameter.grad is None or _is_zero(parameter.grad) for parameter in self.parameters)

    def has_of(self, batch: int) -> bool:
        """Whether they, or those that it has stepped on, are of this batch."""
        return self._batch == batch

    def check_step_behind(self) -> None:
        """RequestError if the optimizer cannot step outside of the loop over the batches."""
        if self.state is GradientState.SEVERAL:
            raise STEP_ON_SEVERAL.error(kind=self.kind)

    def note_step(self) -> None:
        self.state, self._before = GradientState.USED, None
        self._left = (None, 0)  # `zero_grad` frees its memory now


def _is_changed(before: GradientVersion, now: GradientVersion) -> bool:
    return now[0] is None or (now[0] is before[0] and now[1] != before[1])


def _is_zero(gradient: Tensor) -> bool:
    part = local_part(gradient)
    return not bool((part.coalesce().values() if part.is_sparse else part).any())
