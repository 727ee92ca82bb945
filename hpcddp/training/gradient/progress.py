"""State of each optimizer's gradients: none, of one batch, or of several; and what a step may do on them."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hpcddp.training.mistakes import LAYER_UNFROZEN, PARAMETERS_FOREIGN, STEP_AGAIN, STEP_ON_SEVERAL
from hpcddp.training.torch_compat import GradientVersion, gradient_version, is_as_before, local_part


class GradientState(Enum):
    """State of the gradients of one optimizer's parameters."""

    NONE = "none came since they were cleared or stepped on"
    WHOLE = "that of one batch"
    SEVERAL = "those of several batches: nothing has stepped on the earlier ones, or cleared them"


class KnownParameters:
    """The parameters of the prepared models: only these are the same on all ranks.

    `fixed`: whether only those that require a gradient now can be trained, as where DDP or an exact run sums gradients.
    """

    def __init__(self, models: Sequence[nn.Module], *, fixed: bool) -> None:
        named = [(f"{name} of {type(model).__name__}", p) for model in models for name, p in model.named_parameters()]
        self.all = {id(parameter) for _, parameter in named}
        self.frozen = [(name, p) for name, p in named if fixed and not p.requires_grad]

    def check_frozen(self) -> None:
        """RequestError for a parameter that was unfrozen after `rt.prepare`."""
        for name, parameter in self.frozen:
            if parameter.requires_grad:
                raise LAYER_UNFROZEN.error(name=name)


class OptimizerGradients:
    """Gradients of one optimizer of the run. RequestError for parameters of no prepared model."""

    def __init__(self, optimizer: Optimizer, known: KnownParameters) -> None:
        self.optimizer = optimizer
        self.state = GradientState.NONE
        self._batch = 0  # the last whose gradient is in the sum
        self._before: list[GradientVersion] | None = None  # gradients before the pass; None: it reaches this optimizer
        self._reached: Tensor | None = None  # a parameter that the last pass has reached
        self._after: GradientVersion = (None, 0)  # its gradient, as that pass left it
        foreign = sum(id(parameter) not in known.all for parameter in self.parameters)
        if foreign:
            raise PARAMETERS_FOREIGN.error(count=foreign, kind=self.kind)

    @property
    def kind(self) -> str:
        return type(self.optimizer).__name__

    @property
    def parameters(self) -> list[Any]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def begin_pass(self, batch: int, *, alone: bool) -> None:
        """Backward passes over this batch come: find what is left of those before. `alone`: they reach this optimizer,
        for the run has no other."""
        if self.state is not GradientState.NONE and self._are_cleared():
            self.state = GradientState.NONE
        elif self.state is GradientState.WHOLE and self._batch != batch:
            self.state = GradientState.SEVERAL
        self._before = None if alone else [gradient_version(parameter) for parameter in self.parameters]

    def _are_cleared(self) -> bool:
        if self._reached is None or self._reached.grad is None:
            return True
        if is_as_before(self._reached, self._after):
            return False
        return _is_zero(self._reached.grad)  # zero_grad(set_to_none=False), or clipped and kept

    def end_pass(self, batch: int) -> None:
        """The gradients are those of the whole batch."""
        if self._before is None:
            groups = self.optimizer.param_groups
            reached = (one for group in groups for one in group["params"] if one.grad is not None)
        else:
            pairs = zip(self.parameters, self._before, strict=False)  # a group may be new
            reached = (one for one, before in pairs if not is_as_before(one, before))
        found, self._before = next(reached, None), None
        if found is not None:
            self._reached, self._after, self._batch = found, gradient_version(found), batch
            if self.state is GradientState.NONE:
                self.state = GradientState.WHOLE

    def check_step(self, *, had_backward: bool) -> None:
        """RequestError if the optimizer cannot step on them. `had_backward`: whether the loop's batch had one."""
        self.check_step_behind()
        # it may have no part in this batch: as in one process, a step on nothing
        if self.state is GradientState.NONE and not (had_backward and self._have_none()):
            raise STEP_AGAIN.error(kind=self.kind)

    def check_step_behind(self) -> None:
        """RequestError if the optimizer cannot step outside of the loop over the batches."""
        if self.state is GradientState.SEVERAL:
            raise STEP_ON_SEVERAL.error(kind=self.kind)

    def _have_none(self) -> bool:
        return all(parameter.grad is None or _is_zero(parameter.grad) for parameter in self.parameters)

    def end_step(self) -> None:
        """The optimizer has stepped on them."""
        self.state = GradientState.NONE
        self._after = (None, 0)  # `zero_grad` frees its memory now


def _is_zero(gradient: Tensor) -> bool:
    part = local_part(gradient)
    return not bool((part.coalesce().values() if part.is_sparse else part).any())
