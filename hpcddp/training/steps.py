"""The record of each optimizer step: its loss and other sums over the ranks, written one step late."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hpcddp.runs.metrics import MetricsFile
from hpcddp.training.data.weighing import Weighing
from hpcddp.training.gradient.gradients import Gradients
from hpcddp.training.gradient.noise import NoiseMeter
from hpcddp.training.gradient.step_sum import StepResult, StepSum
from hpcddp.training.setup import RunSetup


class StepRecord:
    """Sums what the ranks measure in a step, and writes it to metrics.jsonl."""

    def __init__(self, setup: RunSetup, gradients: Gradients, metrics: MetricsFile) -> None:
        self.noise = NoiseMeter(setup.options.noise_every, setup.group.is_first, gradients.averaged_over)
        self._gradients = gradients
        self._metrics = metrics
        self.loss: float | None = None  # of the newest step whose sums are known, which is one step late
        self._sums = StepSum(setup.layout, setup.group.device, gradients.slots)

    def add_loss(self, loss: Tensor, weight: float | Tensor, slot: int) -> None:
        """The loss of one micro batch, and the weight that its backward pass had."""
        self._sums.add_loss(loss, weight / self._gradients.averaged_over, slot)

    def end_step(self, weighing: Weighing, flags: tuple[str, ...], *, samples: int, **notes: Any) -> str | None:
        """Start this step's sums and write the step before; returns the reason to stop that a rank had in it."""
        more = self.noise.take(notes["step"] - 1) | weighing.take()
        return self._write(self._sums.exchange(samples, flags, more, **notes), weighing)

    def note_input(self, numbers: dict[str, Any]) -> None:
        """How long this rank waited for its input in a loop over the loader."""
        self._metrics.write("input", **numbers)

    def finish(self, weighing: Weighing | None) -> str | None:
        """Write the last step; returns the reason to stop that a rank had in it."""
        return self._write(self._sums.drain(), weighing)

    def _write(self, result: StepResult | None, weighing: Weighing | None) -> str | None:
        """The result is the same on every rank; rank 0 has a file to write it to."""
        if result is None or weighing is None:
            return None
        self.loss = result.numbers["loss"]
        more = self.noise.learn(result.sums) | weighing.learn(result.sums)
        self._metrics.write("step", **result.numbers | more)
        return result.stop
