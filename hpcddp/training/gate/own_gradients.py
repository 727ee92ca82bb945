"""What became of one optimizer's gradients since its last step: whether it may step on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from hpcddp.errors import RequestError
from hpcddp.training.gate.loop_view import LoopView
from hpcddp.training.marks import Mark, mark_all, spread


class OwnGradients:
    """The gradients of one optimizer's parameters."""

    def __init__(self, optimizer: Optimizer, loop: LoopView) -> None:
        self._optimizer = optimizer
        self._loop = loop
        self._chosen: list[nn.Parameter] = []  # the parameters that are marked
        self._held = -1  # parameters, when they were chosen
        self._stepped_at = -1  # backward passes before its last step
        self._stepped_with: list[Mark] = []  # some that it stepped on, until they are cleared
        self.stepped_with_some = False  # whether a gradient reached the last step
        self._cleared_at = -1  # backward passes before they were cleared between backward and step
        self._left: list[Mark] = []  # what this left
        self._before: list[Mark] | None = None  # before a scaled backward pass, where it may reach others only
        self.scaled_at = -1  # backward passes before and with the last scaled one that reached them
        self._scaled_with: list[Mark] = []  # some that this brought
        self.unscaled_at = -1  # backward passes before a scaler unscaled them
        self._at_start: list[Mark] | None = None  # some before this micro batch, where it may reach others only
        self._beside: list[Mark] = []  # some that `loss.backward()` brought, until they are cleared
        self._kept_at = -1  # backward passes before a `zero_grad()` of this micro batch that left them as they were

    @property
    def were_stepped_on(self) -> bool:
        """Whether no backward pass came since the last step."""
        return self._stepped_at == self._loop.backwards

    @property
    def parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for group in self._optimizer.param_groups for parameter in group["params"])

    def mark(self) -> list[Mark]:
        """Some of those that there are, spread over the parameters."""
        held = sum(len(group["params"]) for group in self._optimizer.param_groups)
        marks = mark_all(self._chosen) if held == self._held else []
        if not marks:
            self._chosen, self._held = spread([p for p in self.parameters if p.grad is not None]), held
            marks = mark_all(self._chosen)
        return marks

    def look(self) -> None:
        """Note that they were cleared or set to zero by other means, such as `model.zero_grad()`."""
        self._stepped_with = [mark for mark in self._stepped_with if mark.holds()]
        if self._scaled_with and self._scaled_with[0].parameter.grad is None and not self._loop.accumulates:
            self.scaled_at, self._scaled_with = -1, []

    def expect_backward(self, *, alone: bool) -> None:
        """A backward pass comes. `alone`: the run has no other optimizer, so that each of them reaches these.

        RequestError if it is the second in one of several micro batches, and they were to be cleared before it.
        """
        self.look()
        self._beside = [mark for mark in self._beside if mark.is_there()]  # reads them, if there are any
        if not self._loop.accumulates:
            return
        if not self._loop.has_backward:
            self._at_start = None if alone else [Mark(parameter) for parameter in spread(list(self.parameters))]
        elif self._kept_at == self._loop.backwards:
            raise RequestError(
                "optimizer.zero_grad() came between two rt.backward(loss) of one micro batch, and a global batch has"
                " several here: the gradients of the first would stay in the sum, with those of the micro batches"
                " before",
                "for step in loader.steps(): one pass `for x in step: …` for each optimizer; or"
                " hpcddp.runtime(max_micro_batch=N), where N samples are a rank's whole share of the global batch",
            )

    def note_kept(self) -> None:
        """The optimizer's `zero_grad()` has left them as they were."""
        before = self._at_start
        if self._loop.has_backward and (before is None or not all(mark.holds() for mark in before)):
            self._kept_at = self._loop.backwards

    def note_backward(self) -> None:
        """A backward pass has changed them: that did not clear those of the step before."""
        self._stepped_with = mark_all(mark.parameter for mark in self._stepped_with)

    def note_beside(self, parameters: Sequence[nn.Parameter]) -> None:
        """A backward pass that was not `rt.backward` has brought their gradients."""
        self._beside += [Mark(parameter) for parameter in spread(parameters) if type(parameter.grad) is Tensor]

    def check_beside(self) -> None:
        """RequestError if the optimizer is to step on gradients that `loss.backward()` brought beside `rt.backward`."""
        if self._loop.inside and self._loop.backwards > self._used and any(mark.is_there() for mark in self._beside):
            raise RequestError(
                f"the {type(self._optimizer).__name__} is to step on gradients that loss.backward() brought: they are"
                " not weighted and averaged as those of rt.backward(loss)",
                "rt.backward(loss) in place of each loss.backward(); optimizer.zero_grad() after one that only looks at"
                " gradients",
            )

    def expect_scaled(self) -> None:
        """A scaled backward pass comes that may reach other optimizers only: these gradients are marked before it."""
        self._before = [Mark(parameter) for parameter in self.parameters]

    def note_scaled(self) -> None:
        """The last backward pass was a scaled one."""
        before, self._before = self._before, None
        if before is None or any(map(_may_be_other, before)):
            self.scaled_at, self._scaled_with = self._loop.backwards, self.mark()

    def note_step(self) -> None:
        """The optimizer has stepped on them."""
        self._stepped_at = self._loop.backwards
        self._stepped_with = self.mark()
        self.stepped_with_some = bool(self._stepped_with)

    def are_partial(self) -> bool:
        """Whether they hold what earlier micro batches of this pass brought, so that clearing them would drop that."""
        began = self._loop.backwards_before_pass
        return self._loop.accumulates and self._loop.backwards > began and self._stepped_at <= began

    def note_cleared(self) -> None:
        """The optimizer's `zero_grad()` has cleared them."""
        self._stepped_with, self._scaled_with, self._beside = [], [], []
        self.scaled_at = -1
        if self._loop.inside and self._loop.backwards > self._used:  # between backward and step
            self._cleared_at, self._left = self._loop.backwards, [Mark(p) for p in self.parameters]

    @property
    def _used(self) -> int:
        """The newest backward pass that the next step in this pass over the global batch is too late for."""
        return max(self._stepped_at, self._loop.backwards_before_pass)

    def check_step(self) -> None:
        """RequestError if the optimizer cannot step on them."""
        if not self._loop.inside:
            return
        if self._loop.backwards == self._used:
            raise RequestError(
                "optimizer.step() came without a new rt.backward(loss) since its last one",
                "rt.backward(loss) in place of loss.backward(), then optimizer.step() once",
            )
        if self._stepped_with:
            raise RequestError(
                "optimizer.step() came with the gradients of the step before still in the sum",
                "optimizer.zero_grad() in each step",
            )
        self.check_cleared()

    def are_scaled(self, scale_read_at: int) -> bool:
        """Whether a backward pass has scaled them, and nothing has unscaled them since.

        A script that unscales them itself reads the scale, after so many backward passes, and changes them.
        """
        if self.scaled_at <= max(self._used, self.unscaled_at):
            return False
        unchanged = not self._scaled_with or self._scaled_with[0].holds()
        return unchanged or scale_read_at < self.scaled_at

    def check_scaled(self) -> None:
        """RequestError if a scaler is to unscale them, or step on them, and no backward pass of this pass over the
        global batch has scaled them."""
        if self._loop.inside and self.scaled_at <= self._loop.backwards_before_pass:
            raise RequestError(
                f"a gradient scaler was given to the step of a {type(self._optimizer).__name__}, but there was no"
                " rt.backward(loss, scaler=scaler) before it",
                "rt.backward(loss, scaler=scaler)",
            )

    def check_cleared(self) -> None:
        """RequestError if they were cleared after the last backward pass, and nothing else was put there."""
        if self._loop.inside and self._cleared_at == self._loop.backwards and all(mark.holds() for mark in self._left):
            raise RequestError(
                "optimizer.step() came after the gradients of rt.backward(loss) were cleared",
                "optimizer.zero_grad() before rt.backward(loss), or after optimizer.step()",
            )


def _may_be_other(mark: Mark) -> bool:
    """Whether the gradient may be another one by now. That of a sharded model does not say."""
    gradient = mark.parameter.grad
    return not mark.holds() or (gradient is not None and type(gradient) is not Tensor)
