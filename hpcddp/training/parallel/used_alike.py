"""Whether the ranks that average gradients in shards (FSDP2) have gradients of the same parameters.

Torch adds up those of a block that a rank has, one behind the other. A layer that only some ranks used in a step would
get the gradient of another one, without an error.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from hpcddp.errors import RequestError
from hpcddp.training.parallel.layout import Layout

_CHECKED_FIRST = 2  # passes over a global batch in an attempt


class UsedAlike:
    """Compares the parameters that have a gradient, in the first passes of an attempt."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout = layout
        self._device = device
        self._checked = 0

    def check(self, models: Iterable[nn.Module]) -> None:
        """After the last backward pass of a step. RequestError, on every rank, for a parameter that only some ranks
        have used. A collective in the first steps."""
        if self._checked == _CHECKED_FIRST or self._layout.data_size == 1:
            return
        self._checked += 1
        trained = [(model, name, p) for model in models for name, p in model.named_parameters() if p.requires_grad]
        used = torch.tensor([p.grad is not None for _, _, p in trained], dtype=torch.int64, device=self._device)
        dist.all_reduce(used, group=self._layout.data_group)
        for (model, name, _), count in zip(trained, used.tolist(), strict=True):
            if 0 < count < self._layout.data_size:
                kind = type(model).__name__.removeprefix("FSDP")  # torch has put it in front
                raise RequestError(
                    f"only {count} of {self._layout.data_size} ranks have a gradient for {name} of the {kind} in this"
                    " step: in shards torch would add it to that of another parameter",
                    'hpcddp.runtime(parallel="ddp") with rt.wrap(model, find_unused_parameters=True); or let every rank'
                    " use the layer in each step: output + 0 * layer(x)",
                )
