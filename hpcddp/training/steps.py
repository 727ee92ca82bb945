"""The record of each optimizer step: its loss and other sums over the ranks, written one exchange late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hpcddp.runs.metrics import MetricsFile
from hpcddp.training.data.weighing import Weighing
from hpcddp.training.gradient.gradients import Gradients
from hpcddp.training.gradient.step_sum import Exchanged, StepSum
from hpcddp.training.setup import RunSetup


class StepRecord:
    """Sums what the ranks measure in a step, and writes it to metrics.jsonl."""

    def __init__(self, setup: RunSetup, gradients: Gradients, metrics: MetricsFile) -> None:
        self._gradients = gradients
        self._metrics = metrics
        self.loss: float | None = None  # of the newest step whose sums are known
        self.exchanged = False  # whether the last step's flags are on their way
        self.sums = StepSum(setup.layout, setup.group.device, gradients.slots)

    def add_loss(self, loss: Tensor, weight: float | Tensor, slot: int) -> None:
        """The loss of one micro batch, and the weight that its backward pass had."""
        self.sums.add_loss(loss, weight / self._gradients.averaged_over, slot)

    @property
    def steps_shared(self) -> int:
        """How many steps the ranks now agree on at once."""
        return self.sums.steps_shared

    def end_step(
        self,
        weighing: Weighing,
        flags: Callable[[], tuple[str, ...]],
        *,
        samples: int,
        **notes: Any,
    ) -> str | None:
        """Start this step's sums, if it is time, and write the steps before; returns the reason to stop that a rank had
        in them."""
        self.exchanged = self.sums.add_step(samples, weighing.take(), **notes)
        return self._write(self.sums.exchange(flags()), weighing) if self.exchanged else None

    def note_input(self, numbers: dict[str, Any]) -> None:
        """How long this rank waited for its input in a loop over the loader."""
        self._metrics.write("input", **numbers)

    def catch_up(self, weighing: Weighing | None) -> str | None:
        """Write the steps so far: a checkpoint does not come before its steps. Returns the reason to stop that a rank
        had in them. Waits for the last exchange; call it on every rank at the same step."""
        before = self._write(self.sums.exchange(()), weighing) if self.sums.has_waiting else None
        now = self._write(self.sums.drain(), weighing)
        return before or now

    def _write(self, exchanged: Exchanged, weighing: Weighing | None) -> str | None:
        """The results are the same on every rank; rank 0 has a file to write them to."""
        if weighing is None:
            return None
        for result in exchanged.steps:
            self.loss = result.numbers["loss"]
            self._metrics.write("step", **result.numbers | weighing.learn(result.sums))
        return exchanged.stop
