"""Interface of the ways to sum the gradients of a step.

`mean.py` averages them over the data ranks, as DDP and FSDP do. `exact.py` sums fixed slices in a fixed order, and so
does `exact_shards.py` for a sharded model.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hpcddp.training.data.sampler import MicroBatch
from hpcddp.training.parallel.sharded import WrapOptions


class Gradients:
    """Turns the gradients of a step's micro batches into the gradient of the global batch."""

    slots = 1  # how many numbers the losses of a step are summed in
    averaged_over = 1  # what the sum of all gradients is divided by
    takes_parts_only = False  # whether a share that is one micro batch needs neither `micro` nor `collect`
    buffers_differ = False  # whether buffers such as BatchNorm's differ between data ranks until they are averaged
    forward_is_collective = False  # whether a forward pass is a collective: then all ranks need the same number of them

    def wrap(self, model: nn.Module, wanted: WrapOptions) -> nn.Module:
        """The model on this rank's device, as the training loop is to use it."""
        raise NotImplementedError

    def add_untrained(self, model: nn.Module) -> None:
        """A prepared model that is not trained, such as a teacher: its running statistics follow the same rules."""
        raise NotImplementedError

    def hand_over(self, optimizers: Iterable[Optimizer]) -> None:
        """The optimizers of models that were wrapped right now: they get the parameters that took others' place."""

    def check(self, objects: dict[str, Any]) -> None:
        """RequestError for tracked objects that do not belong to the wrapped models."""

    def micro(self, micro: MicroBatch) -> AbstractContextManager[None]:
        """The context of all forward and backward passes over one micro batch."""
        raise NotImplementedError

    def collect(self, micro: MicroBatch) -> None:
        """All gradients of the micro batch are there: of the last one, make those of the global batch."""

    def pass_ends(self) -> None:
        """Add the gradients of a pass over a batch to those that the parameters had before."""

    def check_step(self) -> None:
        """RequestError if an optimizer cannot step on the gradients of a sharded model. May be a collective."""
