"""The gradients between two micro batches of one step, which only `rt.backward` may change."""

from __future__ import annotations

from torch import Tensor

from hpcddp.errors import RequestError
from hpcddp.training.gate.step_gate import StepGate
from hpcddp.training.marks import Mark, sum_bits


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
