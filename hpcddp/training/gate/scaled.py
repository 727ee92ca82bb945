"""Whether gradients are scaled: a gradient scaler has to be given to the backward pass and to the step alike."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.amp import GradScaler

from hpcddp.errors import RequestError


class ScaledGradients:
    """The gradient scalers of a run, and what they have scaled."""

    def __init__(self) -> None:
        self.scalers: list[GradScaler] = []
        self._last: weakref.ref[Tensor] | None = None  # what `scaler.scale` returned last

    def scale(self, original: Callable[..., Any], outputs: Any) -> Any:
        """In place of `scaler.scale`."""
        result = original(outputs)
        if isinstance(result, Tensor) and result is not outputs:  # a scaler that is off returns what it was given
            self._last = weakref.ref(result)
        return result

    def check_prepared(self, scaler: GradScaler | None) -> None:
        """RequestError for a scaler that the run does not have."""
        if scaler is not None and scaler.is_enabled() and scaler not in self.scalers:
            raise RequestError(
                "the gradient scaler was not prepared",
                "model, optimizer, scaler, loader = rt.prepare(model, optimizer, scaler, loader)",
            )

    def check_loss(self, loss: Tensor) -> None:
        """RequestError for a loss that `scaler.scale` returned."""
        if self._last is not None and self._last() is loss:
            raise RequestError(
                "rt.backward was given a loss that scaler.scale(loss) has scaled: it would be recorded so",
                "rt.backward(loss, scaler=scaler)",
            )
