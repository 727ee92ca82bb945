"""What the first steps of an attempt show of the loop: what it changes by hand in each micro batch, and its loss."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from hpcddp.errors import RequestError
from hpcddp.training.data.sampler import MicroBatch
from hpcddp.training.data.weighing import Weight
from hpcddp.training.gate.step_gate import StepGate
from hpcddp.training.marks import spread
from hpcddp.training.remarks import print_warning
from hpcddp.training.torch_compat import SUM, read_loss

_NUMBERS = 65536  # of a parameter that are compared
_ROUNDING = 8  # units in the last place: a loop may normalise weights in each forward pass

_SUMMED = (
    "the loss is a sum (reduction='sum'), and rt.backward(loss) takes it as the mean over the micro batch: the result"
    " depends on the numbers of ranks and micro batches\nhint: rt.backward(loss, summed=True); for the sum over the"
    " global batch rt.backward(loss * N, summed=True), with its N samples"
)
_UNEVEN = (
    "the loss is a mean over more or fewer parts in one micro batch than in another (ignore_index, class weights), and"
    " rt.backward(loss) weighs it by the samples: the result depends on the numbers of ranks and micro batches\nhint:"
    " loader = rt.loader(loader, count=lambda batch: int((batch[1] != -100).sum())), before rt.prepare(model,"
    " optimizer); with class weights: count=lambda batch: float(class_weights[batch[1]].sum())"
)

Parts = list[tuple[nn.Parameter, Tensor]]


class FirstSteps:
    """Looks at the micro batches of the first steps."""

    def __init__(self, gate: StepGate) -> None:
        self._gate = gate
        self._at_start: Parts = []  # of the first micro batch of a pass
        self._at_backward: Parts = []  # in it
        self._rates: list[float] = []  # in it; none if it had no backward pass
        self._moved = False  # whether the weights are others when a later one starts
        self._share: float | None = None  # what counts in the loss, for each part that its weight counts
        self._warned = False

    def start(self, micro: MicroBatch) -> None:
        """A micro batch starts."""
        self._moved = micro.nth > 0 and _differ(self._at_start)
        if micro.nth == 0:
            self._at_start = [] if micro.last else self._copy()
            self._at_backward, self._rates = [], []

    def look(self, loss: Tensor, micro: MicroBatch, weight: Weight, *, summed: bool, is_again: bool) -> None:
        """Its first backward pass comes. RequestError if the loop has changed weights or learning rates since that of
        the first micro batch; a warning of a loss whose weight does not fit it."""
        rates = [float(group["lr"]) for seen in self._gate.optimizers for group in seen.optimizer.param_groups]
        if micro.nth == 0:
            self._at_backward, self._rates = ([], []) if micro.last else (self._copy(), rates)
        elif self._rates and rates != self._rates and not (micro.last and self._gate.asked_last):
            raise _refuse(
                "a learning rate",
                "before rt.backward(loss): lr = schedule(rt.steps), in place of a count of the loader's batches",
            )
        elif self._moved and _differ(self._at_backward):
            raise _refuse("weights", "if rt.is_last_micro_batch: … around it, after optimizer.step()")
        if not is_again and 0 < micro.samples < micro.total:
            print_warning(self._describe(loss, micro, weight, summed=summed), is_first=self._gate.is_first)

    def _copy(self) -> Parts:
        """Some of the weights. Those of a sharded model are no plain tensors, and gathered at times."""
        chosen = spread([p for seen in self._gate.optimizers for p in seen.gradients.parameters])
        return [(p, _part(p).clone()) for p in chosen if type(p.data) is Tensor and p.is_contiguous()]

    def _describe(self, loss: Tensor, micro: MicroBatch, weight: Weight, *, summed: bool) -> str | None:
        """A warning, or None. Only a loss that is the result of one of torch's functions says how it was made."""
        reduction, counted = read_loss(loss)
        if reduction == SUM:
            return None if summed or micro.samples == 1 else self._once(_SUMMED)
        if counted is None or summed or not weight.counted:
            return None
        share = float(counted) / weight.counted
        before, self._share = self._share, share
        return None if before is None or math.isclose(share, before, rel_tol=1e-5) else self._once(_UNEVEN)

    def _once(self, warning: str) -> str | None:
        warned, self._warned = self._warned, True
        return None if warned else warning


def _part(parameter: nn.Parameter) -> Tensor:
    return parameter.detach().view(-1)[:_NUMBERS]


def _differ(before: Parts) -> bool:
    """Whether some of these weights are others now."""
    for parameter, old in before:
        if parameter.numel() and parameter.is_floating_point() and parameter.device == old.device:
            largest = _ROUNDING * torch.finfo(old.dtype).eps * old.abs().max()
            if bool(((_part(parameter) - old).abs().max() > largest).item()):
                return True
    return False


def _refuse(what: str, hint: str) -> RequestError:
    return RequestError(
        f"the loop changed {what} between two micro batches of one step: done in each of them, that acts several times"
        " per optimizer step",
        hint,
    )
