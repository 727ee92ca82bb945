"""What a gradient scaler does once per global batch, and what it may step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.amp import GradScaler
from torch.optim import Optimizer

from hpcddp.training.gate.loop_view import LoopView
from hpcddp.training.gate.optimizers import OptimizerSteps, SeenOptimizer
from hpcddp.training.torch_compat import note_steps


class SeenScaler:
    """One gradient scaler: its `unscale_`, `step`, `update` and `get_scale`."""

    def __init__(self, scaler: GradScaler, steps: OptimizerSteps, loop: LoopView) -> None:
        self._scaler = scaler
        self._steps = steps
        self._loop = loop

    def unscale(self, original: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not self._loop.acts:
            return None
        seen = self._find_ready(optimizer)
        if seen is not None:
            seen.gradients.unscaled_at = self._loop.backwards
            self._note_use(optimizer)
        return original(optimizer, *args, **kwargs)

    def step(self, original: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        self._steps.asked = True
        if not self._loop.acts:
            self._steps.calls.note_early(optimizer, "step", is_optimizer=True)
            return None
        seen = self._find_ready(optimizer)
        self._steps.scaling = True
        try:
            result = original(optimizer, *args, **kwargs)
        finally:
            self._steps.scaling = False
        if seen is not None:
            seen.note_step()  # the scaler leaves a step out if a gradient is infinite
            note_steps(optimizer)  # so its scheduler may step before it does, which torch warns of
            self._note_use(optimizer)
        return result

    def update(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._loop.acts:
            return None
        result = original(*args, **kwargs)
        self._steps.scaled.note_update(self._scaler, self._loop.backwards)
        return result

    def get_scale(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._steps.scale_read_at = self._loop.backwards
        return original(*args, **kwargs)

    def _find_ready(self, optimizer: Optimizer) -> SeenOptimizer | None:
        """This optimizer, if it was prepared, with the gradients of the whole global batch. RequestError if it cannot
        step with this scaler."""
        seen = self._steps.find(optimizer)
        if seen is not None:
            seen.check_scaled(self._scaler)
        self._loop.collect()
        return seen

    def _note_use(self, optimizer: Optimizer) -> None:
        self._steps.scaled.note_use(self._scaler, optimizer, self._loop.backwards)
