"""What the first steps of an attempt show of the loop: what it changes by hand in each micro batch, and its loss."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcddp.errors import RequestError
from hpcddp.training.data.sampler import MicroBatch
from hpcddp.training.data.weighing import Weight
from hpcddp.training.gate.loss_terms import is_summed
from hpcddp.training.gate.step_gate import StepGate
from hpcddp.training.marks import spread
from hpcddp.training.parallel.layout import Layout
from hpcddp.training.remarks import print_warning
from hpcddp.training.torch_graph import read_counted

_COMPARED = 2  # steps of an attempt
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
        self.renormed: set[int] = set()  # ids of the weights that forward passes may change
        self._gate = gate
        self._at_start: Parts = []  # of the first micro batch of a pass
        self._at_backward: Parts = []  # in it
        self._rates: list[float] = []  # in it; none if it had no backward pass
        self._moved = False  # whether the weights are others when a later one starts
        self._shares: list[float] = []  # of a step's losses: what counts in one, for each part that its weight counts
        self._compared = 0  # steps
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
        if is_again:
            return
        if micro.nth == 0:  # the global batch before may have been dropped
            self._shares = []
        if 0 < micro.samples < micro.total and not summed:
            self._look_at_loss(loss, micro, weight)

    def compare_shares(self, layout: Layout, device: torch.device) -> None:
        """After each step: in the first ones, a warning if a mean over other parts than those that weigh it had more of
        them in one micro batch of the step than in another, on any rank. A collective, of two numbers."""
        if self._compared >= _COMPARED:
            return
        self._compared += 1
        most, least = max(self._shares, default=-math.inf), min(self._shares, default=math.inf)
        ends = torch.tensor([most, -least], dtype=torch.float64)
        self._shares = []
        if layout.world_size > 1:
            ends = ends.to(device)
            dist.all_reduce(ends, dist.ReduceOp.MAX)
        most, least = ends[0].item(), -ends[1].item()
        if math.isfinite(most) and not math.isclose(most, least, rel_tol=1e-5):
            self._warn(_UNEVEN)

    def _copy(self) -> Parts:
        """Some of the weights. Those of a sharded model are no plain tensors, and gathered at times."""
        chosen = spread([p for seen in self._gate.optimizers for p in seen.gradients.parameters])
        plain = [p for p in chosen if type(p.data) is Tensor and p.is_contiguous() and id(p) not in self.renormed]
        return [(p, _part(p).clone()) for p in plain]

    def _look_at_loss(self, loss: Tensor, micro: MicroBatch, weight: Weight) -> None:
        """Only a loss that is made of results of torch's functions says how it was made."""
        made_by = getattr(loss, "grad_fn", None)
        if is_summed(made_by, micro.samples):
            if micro.samples > 1:
                self._warn(_SUMMED)
        elif (counted := read_counted(made_by)) is not None and weight.counted:
            self._shares.append(counted / weight.counted)

    def _warn(self, warning: str) -> None:
        if not self._warned:
            print_warning(warning, is_first=self._gate.is_first)
        self._warned = True


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
