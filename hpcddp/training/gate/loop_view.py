"""What optimizers see of the training loop."""

from __future__ import annotations

from typing import Protocol


class LoopView(Protocol):
    """Where the loop is in its global batch."""

    @property
    def inside(self) -> bool:
        """Whether the loop has taken a batch and its step has not ended."""

    @property
    def is_in_epoch(self) -> bool:
        """Whether the loop is in the body of `rt.epochs`, or in a global batch."""

    @property
    def acts(self) -> bool:
        """Whether this is the last micro batch of a pass, or no micro batch at all."""

    @property
    def is_left(self) -> bool:
        """Whether the loop over the batches was left, and no backward pass came since."""

    @property
    def accumulates(self) -> bool:
        """Whether the pass over this global batch has several micro batches, and the loop is in one of them."""

    @property
    def has_backward(self) -> bool:
        """Whether a backward pass was made in this micro batch."""

    @property
    def backwards(self) -> int:
        """Backward passes since the start of the attempt."""

    @property
    def backwards_before_pass(self) -> int:
        """The same when this pass over the global batch began."""

    def collect(self) -> None:
        """Make the gradient of the global batch, if that was not done yet."""
