"""What the optimizers of a run have done in the global batch that the loop is at, and what each of them may do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from hpcddp.errors import RequestError
from hpcddp.training.gate.asked import AskedSteps
from hpcddp.training.gate.loop_view import LoopView
from hpcddp.training.gate.nested import find_outer
from hpcddp.training.gate.own_gradients import OwnGradients
from hpcddp.training.gate.parameters import KnownParameters
from hpcddp.training.gate.scaled import ScaledGradients
from hpcddp.training.marks import Mark
from hpcddp.training.torch_compat import note_steps

_EITHER = "if norm.isfinite(): optimizer.step(); else: rt.skip_step(), or rt.skip_step(optimizer) for one of several"


class OptimizerSteps:
    """All optimizers of a run, and which of them have stepped in this global batch."""

    def __init__(self) -> None:
        self.optimizers: list[SeenOptimizer] = []
        self.scaled = ScaledGradients()
        self.known: KnownParameters | None = None  # as soon as all objects are taken
        self.scaling = False  # a scaler steps an optimizer, now
        self.asked = False  # for a step in this micro batch
        self.asked_last = False  # whether the script asked if it is the last
        self.acted = False  # some optimizer in this global batch
        self.acts = False  # an optimizer, now
        self.reached = False  # some gradient an optimizer that acted in this global batch
        self.calls = AskedSteps()
        self.stepped: set[int] = set()  # optimizers that have stepped in this global batch, by id
        self.skipped: set[int] = set()  # those whose step was left out on purpose
        self.scale_read_at = -1  # backward passes before the script asked a scaler for its scale
        self.keeps_memory = False  # whether DDP, or an exact sum, has memory of its own for gradients
        self._places: list[Mark] = []  # gradients that are to stay in their memory until the step

    def batch_starts(self) -> None:
        """The loop gets the first micro batch of a global batch."""
        self.acted = self.reached = False
        self.calls.start()
        self.stepped.clear()
        self.skipped.clear()

    def note_places(self, *, looks: bool) -> None:
        """The gradients are where the ranks have put them. `looks`: whether `check_places` is to look."""
        looks &= self.keeps_memory
        self._places = [mark for seen in self.optimizers for mark in seen.gradients.mark()] if looks else []

    def check_places(self) -> None:
        """RequestError if the script has given a gradient other memory, which DDP and the exact sums keep their own
        of."""
        if any(mark.was_moved() for mark in self._places):
            raise RequestError(
                "p.grad.data = … came between rt.backward(loss) and optimizer.step(): the ranks go on with the memory"
                " that the gradient had before",
                "p.grad.clamp_(-1, 1), or another change in place; or p.grad = p.grad.clamp(-1, 1)",
            )

    def find(self, optimizer: Optimizer) -> SeenOptimizer | None:
        return next((seen for seen in self.optimizers if seen.optimizer is optimizer), None)


class SeenOptimizer:
    """One optimizer: its `step` and `zero_grad`."""

    def __init__(self, optimizer: Optimizer, steps: OptimizerSteps, loop: LoopView) -> None:
        self.optimizer = optimizer
        self.gradients = OwnGradients(optimizer, loop)
        self.clear: Callable[[], None] = optimizer.zero_grad
        self._steps = steps
        self._loop = loop
        self._held = -1  # parameters, when they were looked at last
        self._frozen: list[nn.Parameter] = []  # of these, those that cannot be trained

    def step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._steps.asked = True
        if self._loop.inside and any(map(callable, (*args, *kwargs.values()))):
            raise RequestError(
                "optimizer.step(closure) is not supported: it evaluates one batch, perhaps several times, and a step"
                " here is that of the global batch",
                "rt.backward(loss); optimizer.first_step(zero_grad=True); rt.backward(loss_fn(model(x), y));"
                " optimizer.second_step(zero_grad=True)"
                if hasattr(self.optimizer, "second_step")
                else "rt.backward(loss); optimizer.step(), with an optimizer that needs no closure",
            )
        if self._loop.accumulates and not self._steps.acts:
            self._check_outer()
        if not self._loop.acts:
            self.note_early()
            return None
        self._check_parameters()
        self.gradients.check_beside()
        self._steps.check_places()
        self._loop.collect()
        self._check_not_skipped()
        self.gradients.check_step()
        if self._loop.inside and not self._steps.scaling and self.gradients.are_scaled(self._steps.scale_read_at):
            raise RequestError(
                "optimizer.step() came with gradients which rt.backward(loss, scaler=scaler) has scaled",
                "rt.step(optimizer, scaler=scaler), or scaler.step(optimizer); scaler.update()",
            )
        self._steps.acts = True
        try:
            result = original(*args, **kwargs)
        finally:
            self._steps.acts = False
        self.note_step()
        return result

    def note_early(self) -> None:
        """Its step was asked for before the last micro batch."""
        self._steps.calls.note_early(self.optimizer, "step", is_optimizer=True)

    def _check_outer(self) -> None:
        """RequestError if this belongs to another optimizer, such as one for SAM, which acts between its steps."""
        outer = find_outer(self.optimizer, [seen.optimizer for seen in self._steps.optimizers])
        if outer is not None:
            raise RequestError(
                f"the {outer[0]} has this {type(self.optimizer).__name__} step, and a global batch has several micro"
                f" batches here: what the {outer[0]} does before would be done in each of them",
                "hpcddp.runtime(max_micro_batch=N), where N samples are a rank's whole share of the global batch",
            )

    def _check_parameters(self) -> None:
        """RequestError for parameters that came, or were unfrozen, after `rt.prepare`."""
        known, held = self._steps.known, sum(len(group["params"]) for group in self.optimizer.param_groups)
        if known is not None and held != self._held:
            self._held, self._frozen = held, known.find_frozen(self.optimizer)
        if known is not None and self._frozen:
            known.check_frozen(self._frozen)

    def check_scaled(self, scaler: GradScaler) -> None:
        """RequestError if it cannot step with this scaler."""
        self._check_not_skipped()
        self.gradients.check_beside()
        self.gradients.check_cleared()
        if scaler.is_enabled():
            self.gradients.check_scaled()
            if self._loop.inside and not self.gradients.were_stepped_on:
                self._steps.scaled.check_updates(scaler, self.optimizer, self.gradients.scaled_at)

    def check_not_stepped(self) -> None:
        """RequestError if it has stepped in this global batch."""
        if id(self) in self._steps.stepped:
            raise RequestError(f"rt.skip_step() came after the {type(self.optimizer).__name__} had stepped", _EITHER)

    def _check_not_skipped(self) -> None:
        if id(self) in self._steps.skipped:
            raise RequestError("optimizer.step() came after rt.skip_step() in one global batch", _EITHER)

    def skip(self) -> None:
        """Leave this step out: the gradients are dropped, and the batch counts."""
        self._note_done()
        self._steps.skipped.add(id(self))
        note_steps(self.optimizer)  # a scheduler may step, as after a step that a gradient scaler leaves out
        self.clear()
        self.gradients.note_cleared()

    def note_step(self) -> None:
        """It has stepped."""
        self._note_done()
        self._steps.stepped.add(id(self))

    def _note_done(self) -> None:
        self.gradients.note_step()
        self._steps.calls.note_acted(self.optimizer)
        self._steps.acted = True
        self._steps.reached |= self.gradients.stepped_with_some

    def zero_grad(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Acts unless that would drop what earlier micro batches of this pass brought."""
        if self.gradients.are_partial():
            if not any(find_outer(seen.optimizer, [self.optimizer]) for seen in self._steps.optimizers):
                self.gradients.note_kept()  # of the others the step of the inner one says what is wrong
            return
        original(*args, **kwargs)
        self.gradients.note_cleared()
