"""Whether gradients are scaled: a gradient scaler has to be given to the backward pass and to the step alike."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from hpcddp.errors import RequestError


class ScaledGradients:
    """The gradient scalers of a run, and what they have scaled."""

    def __init__(self) -> None:
        self.scalers: list[GradScaler] = []
        self._last: weakref.ref[Tensor] | None = None  # what `scaler.scale` returned last
        self._updated_at: dict[int, int] = {}  # by scaler: backward passes before its last update
        self._used_at: dict[int, dict[int, int]] = {}  # by scaler and optimizer: the same, since its last update

    def scale(self, original: Callable[..., Any], outputs: Any) -> Any:
        """In place of `scaler.scale`."""
        result = original(outputs)
        if isinstance(result, Tensor) and result is not outputs:  # a scaler that is off returns what it was given
            self._last = weakref.ref(result)
        return result

    def check_prepared(self, scaler: GradScaler | None, loss: Tensor | None = None) -> None:
        """RequestError for a scaler that the run does not have, and for a loss that `scaler.scale` returned."""
        if scaler is not None and scaler.is_enabled() and scaler not in self.scalers:
            raise RequestError(
                "the gradient scaler was not prepared",
                "model, optimizer, scaler, loader = rt.prepare(model, optimizer, scaler, loader)",
            )

        if loss is not None and self._last is not None and self._last() is loss:
            raise RequestError(
                "rt.backward was given a loss that scaler.scale(loss) has scaled: it would be recorded so",
                "rt.backward(loss, scaler=scaler)",
            )

    def note_update(self, scaler: GradScaler, backwards: int) -> None:
        """After so many backward passes it has made its next scale, and forgotten what it has unscaled."""
        self._updated_at[id(scaler)] = backwards
        self._used_at.pop(id(scaler), None)

    def note_use(self, scaler: GradScaler, optimizer: Optimizer, backwards: int) -> None:
        """After so many backward passes it has unscaled the optimizer's gradients, or stepped it."""
        self._used_at.setdefault(id(scaler), {})[id(optimizer)] = backwards

    def check_updates(self, scaler: GradScaler, optimizer: Optimizer, scaled_at: int) -> None:
        """RequestError if the gradients, which a backward pass has scaled, are to be unscaled with another scale, or
        would not be unscaled, since the scaler takes them for those that it has unscaled before."""
        kind = type(optimizer).__name__
        if scaled_at <= self._updated_at.get(id(scaler), -1):
            raise RequestError(
                f"scaler.update() came between rt.backward(loss, scaler=scaler) and the step of this {kind}: its"
                " gradients would be divided by another scale than they were multiplied with",
                "rt.step(oa, ob, scaler=scaler) for both optimizers, or scaler.step(oa); scaler.step(ob);"
                " scaler.update()",
            )
        if self._used_at.get(id(scaler), {}).get(id(optimizer), scaled_at) < scaled_at:
            raise RequestError(
                f"the gradient scaler has unscaled the gradients of this {kind} before the last rt.backward(loss,"
                " scaler=scaler), and there was no scaler.update() since",
                "scaler.update() in each step, also after rt.skip_step()",
            )
