"""Optimizers, schedulers and averages that act in a run and were not prepared: their state is in no checkpoint."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel

from hpcddp.errors import RequestError
from hpcddp.training.data.sampler import MicroBatch
from hpcddp.training.data.weighing import Weight
from hpcddp.training.gate.step_gate import LoopView, StepGate, find_outer
from hpcddp.training.marks import Mark, spread, sum_bits
from hpcddp.training.parallel.layout import Layout
from hpcddp.training.remarks import print_warning
from hpcddp.training.torch_compat import (
    MEAN,
    SUM,
    around_backward,
    has_scheduler,
    read_counted,
    read_factor,
    read_reduction,
)


@contextmanager
def guarding(gate: StepGate, loop: LoopView, models: Sequence[nn.Module]) -> Iterator[None]:
    """Meanwhile RequestError if an optimizer or an AveragedModel that was not taken steps or averages parameters of
    these models in the loop: it would do that in each micro batch."""
    known = {id(parameter) for model in models for parameter in model.parameters()}

    def look(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        if gate.acts or not loop.inside:  # one that steps another inside, such as ZeRO's
            return
        if any(id(parameter) in known for group in optimizer.param_groups for parameter in group["params"]):
            outer = find_outer(optimizer, [seen.optimizer for seen in gate.optimizers])
            raise RequestError(
                f"this {type(optimizer).__name__} steps a prepared model, and was not prepared itself",
                f"model, optimizer, inner, loader = rt.prepare(model, optimizer, optimizer.{outer[1]}, loader)"
                if outer is not None
                else "model, optimizer, loader = rt.prepare(model, optimizer, loader), with all optimizers",
            )

    update = AveragedModel.update_parameters

    def update_parameters(average: AveragedModel, model: nn.Module) -> None:
        if loop.is_in_epoch and not gate.has_taken(average) and any(id(p) in known for p in model.parameters()):
            raise RequestError(
                "this AveragedModel averages a prepared model, and was not prepared itself: it would do so in each"
                " micro batch, and no checkpoint has it",
                "ema = AveragedModel(model); model, optimizer, ema, loader = rt.prepare(model, optimizer, ema, loader)",
            )
        update(average, model)

    handle = register_optimizer_step_pre_hook(look)
    AveragedModel.update_parameters = update_parameters  # type: ignore[method-assign, assignment]  # torch has no hook for it
    try:
        yield
    finally:
        AveragedModel.update_parameters = update  # type: ignore[method-assign]  # as it was
        handle.remove()


def check_schedulers(gate: StepGate) -> None:
    """RequestError if an optimizer's scheduler was not taken: a resumed run would begin its schedule anew."""
    for seen in gate.optimizers:
        taken = any(scheduler.optimizer is seen.optimizer for scheduler in gate.schedulers)
        if has_scheduler(seen.optimizer) and not taken:
            raise RequestError(
                f"the {type(seen.optimizer).__name__} has a scheduler that was not prepared",
                "model, optimizer, scheduler, loader = rt.prepare(model, optimizer, scheduler, loader)",
            )


def check_optimizers_of(models: Sequence[nn.Module], gate: StepGate) -> None:
    """RequestError for an optimizer that would step parameters of no model of the run."""
    known = {id(parameter) for model in models for parameter in model.parameters()}
    for seen in gate.optimizers:
        groups: list[dict[str, Any]] = seen.optimizer.param_groups
        foreign = sum(id(p) not in known for group in groups for p in group["params"])
        if foreign:
            raise RequestError(
                f"{foreign} of the parameters of a {type(seen.optimizer).__name__} belong to no prepared model",
                "give rt.prepare every model that is trained, and make the optimizer from their parameters",
            )


# The gradients between two micro batches of one step, which only `rt.backward` may change.


class GradientsBetween:
    """Marks some gradients after a backward pass, and looks at them before the next."""

    def __init__(self, gate: StepGate) -> None:
        self._gate = gate
        self._marks: list[tuple[Mark, Tensor | None]] = []  # with what is read of it
        self._are_alone = False

    def forget(self) -> None:
        self._marks = []

    def mark(self, *, is_last: bool, are_alone: bool, read: bool) -> None:
        """A backward pass is over: the pass's `is_last` one, or another micro batch follows.

        `are_alone`: no DDP model puts other tensors in their place. `read`: all of a marked gradient is read, which
        finds what `p.grad.data` has changed, too.
        """
        self.forget()
        if is_last:
            self._gate.note_places(looks=read)
            return
        self._are_alone = are_alone
        self._marks = [
            (mark, sum_bits(gradient) if read and not gradient.is_sparse else None)
            for seen in self._gate.optimizers
            for mark in seen.gradients.mark()
            # that of a sharded model is no plain tensor, and summed elsewhere until the last micro batch
            if (gradient := mark.parameter.grad) is not None and type(gradient) is Tensor
        ]

    def check(self) -> None:
        """RequestError if one of them was changed."""
        if any(self._was_changed(mark, bits) for mark, bits in self._marks):
            raise RequestError(
                "gradients were changed between two micro batches of one step, by clipping, loss.backward(),"
                " model.zero_grad() or p.grad = None",
                "optimizer.zero_grad(); rt.backward(loss); if rt.is_last_micro_batch: clip; optimizer.step()",
            )

    def _was_changed(self, mark: Mark, bits: Tensor | None) -> bool:
        gradient = mark.parameter.grad
        if gradient is None or mark.was_changed() or (self._are_alone and not mark.holds()):
            return True
        return bits is not None and not gradient.is_sparse and bool(sum_bits(gradient) != bits)


# Backward passes beside `rt.backward`: an optimizer cannot step on what `loss.backward()` has brought.


@contextmanager
def watching(gate: StepGate) -> Iterator[None]:
    """Meanwhile each backward pass that is not `rt.backward` is noted at the optimizers that it reaches.

    It costs nothing in `rt.backward`, and about 2 µs for each parameter elsewhere.
    """

    @contextmanager
    def noting() -> Iterator[None]:
        if gate.is_in_backward:
            yield
            return
        before = [[Mark(parameter) for parameter in seen.gradients.parameters] for seen in gate.optimizers]
        yield
        for seen, marks in zip(gate.optimizers, before, strict=True):
            seen.gradients.note_beside([mark.parameter for mark in marks if not mark.holds()])

    with around_backward(noting):
        yield


# What a loss says of how it was made: whether it is a sum, or a mean over so many parts.


_MOST = 64  # nodes that are looked at
_ADDS = ("AddBackward", "SubBackward", "NegBackward")
_MEANS = ("DivBackward", "MeanBackward")


def is_summed(made_by: Any, samples: int) -> bool:
    """Whether the node of the graph that made this loss, or one of the terms it adds, is a function of torch's own that
    has summed over a micro batch of so many samples. Not so if a term is a mean, also one by hand: a sum beside a mean
    may be one over weights."""
    left = [made_by]
    found = False
    for _ in range(_MOST):
        if not left:
            break
        node = left.pop()
        reduction, name = read_reduction(node), type(node).__name__
        found |= reduction == SUM
        if reduction == MEAN or name.startswith(_MEANS):
            return False
        below = [lower for lower, _ in getattr(node, "next_functions", ()) if lower is not None]
        if name.startswith(_ADDS):
            left += below
        elif name.startswith("MulBackward") and len(below) == 1:
            factor = read_factor(node)
            if factor is None or _divides(factor, samples):
                return False
            left += below
    return found


def _divides(factor: float, samples: int) -> bool:
    """Whether to multiply by it is to divide by the samples, or by the parts of all samples."""
    parts = 1 / factor / samples if factor else 0.0
    return parts > 0.5 and abs(parts - round(parts)) < 1e-4 * parts


# What the first steps of an attempt show of the loop: what it changes by hand in each micro batch, and its loss.


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


# Embeddings with `max_norm`: their forward pass changes weights, of the rows that it looks up.


def find_renormed(model: nn.Module, ranks: int) -> set[int]:
    """The ids of the weights that this model's forward passes change, each row before its use, and nothing else uses.

    RequestError where several data ranks would each change the rows of their own samples only.
    """
    layers = {name: layer for name, layer in model.named_modules() if _is_renormed(layer)}
    if layers and ranks > 1:
        name, layer = next(iter(layers.items()))
        called = f"{name or 'the model'}, an {type(layer).__name__} with max_norm={layer.max_norm:g}"
        raise RequestError(
            f"{called}, changes the rows that its forward pass looks up, and each rank looks up those of its own"
            " samples: the ranks' weights would differ",
            "max_norm=None, and on every rank, for all rows, before the first step and after each one (if"
            " rt.is_last_micro_batch): with torch.no_grad():"
            f" emb.weight.renorm_({layer.norm_type:g}, 0, {layer.max_norm:g})",
        )
    uses = Counter(id(p) for layer in model.modules() for p in layer.parameters(recurse=False))
    return {id(layer.weight) for layer in layers.values() if uses[id(layer.weight)] == 1}


def _is_renormed(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None


# Whether a global batch has trained: it had backward passes, in their order, and the step that was asked for.


LOOP = "for x, y in loader: … rt.backward(loss_fn(model(x), y)); optimizer.step()"


def check_step(gate: StepGate, total: int, *, had_backward: bool) -> None:
    """RequestError if the global batch of `total` samples went by without its step."""
    if not had_backward:
        raise RequestError(
            "a global batch went by without rt.backward(loss)",
            f"{LOOP}. To read the data without training: model, optimizer, loader, reading = rt.prepare(model,"
            " optimizer, loader, DataLoader(dataset, 256)); for x, y in reading: …",
        )
    if not gate.optimizers:
        raise RequestError(
            "this run has no optimizer: none was prepared",
            "model, optimizer, loader = rt.prepare(model, optimizer, loader)",
        )
    if not gate.acted:
        raise RequestError(
            "a global batch went by without optimizer.step()",
            f"{LOOP}. To accumulate K batches: hpcddp.runtime(global_batch=K * {total}), and a step for each"
            " batch of the loader. To leave a step out: rt.skip_step()",
        )
    if not gate.reached:
        raise RequestError("rt.backward(loss) brought no gradient to any optimizer of this run", LOOP)
    gate.check_calls()


def check_order(gate: StepGate, *, accumulates: bool, is_taken: bool) -> None:
    """A backward pass is asked for. RequestError if it comes after the step of its micro batch, where that cannot be.

    `accumulates`: the step is made later. `is_taken`: the gradients are taken away already.
    """
    turns = "for step in loader.steps(): one pass `for x in step: …` for each optimizer"
    if accumulates and gate.asked:
        whole = "hpcddp.runtime(max_micro_batch=N), where N samples are a rank's whole share of the global batch"
        raise RequestError(
            "rt.backward(loss) came after optimizer.step() in one micro batch, but the optimizer steps once per global"
            " batch, which has several micro batches here",
            turns if len(gate.optimizers) > 1 else f"{whole}: one optimizer may step several times in each batch then",
        )
    if is_taken:
        raise RequestError(
            "rt.backward(loss) came after optimizer.step() in one batch, and an exact run takes gradients once", turns
        )


def refuse_outside(*, is_over: bool) -> RequestError:
    """What was asked for needs a batch of the training loader, and there is none. `is_over`: there was one."""
    return RequestError(
        "the loop is in no batch of the training loader: that belongs into the loop over the loader which rt.prepare"
        f" returned for the first DataLoader that it was given{', before it ends' if is_over else ''}",
        f"model, optimizer, loader, test = rt.prepare(model, optimizer, loader, test); {LOOP}",
    )


# Global batches that the loop leaves before their last micro batch: their backward passes train nothing.


_HINT = "if rt.is_last_micro_batch and …: break; or one global batch at a time: for step in loader.steps(): …"


class DroppedBatches:
    """Counts them. The first is a warning: a loop may end so. Two without a step between them are a mistake."""

    def __init__(self, *, is_first: bool) -> None:
        self._is_first = is_first
        self._dropped_after = -1  # steps of this attempt

    def note(self, steps: int) -> None:
        """One with backward passes is dropped, after so many steps of this attempt. RequestError for the second in a
        row."""
        if self._dropped_after == steps:
            raise RequestError(
                "the loop left two global batches in a row before their last micro batch: what rt.backward(loss)"
                " brought is dropped, and no optimizer steps",
                _HINT,
            )
        if self._dropped_after < 0:
            print_warning(
                "the loop left a global batch before its last micro batch: what rt.backward(loss) brought is dropped"
                f"\nhint: {_HINT}",
                is_first=self._is_first,
            )
        self._dropped_after = steps

    def check_trained(self, steps: int) -> None:
        """At the end of an attempt of so many steps. RequestError if all that it did was dropped."""
        if steps == 0 and self._dropped_after == 0:
            raise RequestError(
                "nothing was trained: the loop left its only global batch before the last micro batch", _HINT
            )
