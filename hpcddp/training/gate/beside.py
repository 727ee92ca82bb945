"""Backward passes beside `rt.backward`: an optimizer cannot step on what `loss.backward()` has brought."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hpcddp.training.gate.step_gate import StepGate
from hpcddp.training.marks import Mark
from hpcddp.training.torch_graph import around_backward


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
