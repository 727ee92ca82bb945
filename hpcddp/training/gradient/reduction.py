"""A few numbers summed over the ranks one step late, so that no rank waits for them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class LaggedSum:
    """`push` starts the sum of this step over all ranks; `pull` returns the one pushed before. Every rank calls both in
    the same order.

    On CUDA the sum goes through a pinned buffer and an event, so the host waits for the step before and never for this
    one.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._work: dist.Work | None = None
        self._values: Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def push(self, values: Tensor) -> None:
        """Start the sum of a float64 vector; pull the one before first."""
        if self._world_size > 1:
            self._work = dist.all_reduce(values, async_op=True)
        self._values = values
        if values.is_cuda:
            if self._work is not None:
                self._work.wait()  # orders the streams; does not stop the host
                self._work = None
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch does not annotate it
            self._copied.record()

    def pull(self) -> list[float] | None:
        """The sums pushed last, or None if none are under way."""
        if self._values is None:
            return None
        if self._work is not None:
            self._work.wait()
        if self._copied is not None:
            self._copied.synchronize()
        numbers: list[float] = self._values.tolist()
        self._work = self._values = self._copied = None
        return numbers
