"""How long the first save may take, from the bytes that the optimizers of this process step on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from hpcddp.training.checkpoint.checkpointer import PROBE_BYTES, time_probe


class SeenOptimizers:
    """The optimizers that have made a step, whoever holds them: frameworks wrap them."""

    def __init__(self) -> None:
        self._seen: WeakSet[Optimizer] = WeakSet()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside the body torch reports each step."""
        handle = register_optimizer_step_post_hook(lambda optimizer, *_: self._seen.add(optimizer))
        try:
            yield
        finally:
            handle.remove()

    def guess_save_s(self, folder: Path) -> float:
        """Seconds to write this rank's parameters and their optimizers' state; 0 if none has made a step."""
        size = sum(_count_bytes(optimizer) for optimizer in self._seen)
        return (1 + size / PROBE_BYTES) * time_probe(folder / ".probe-integrations") if size else 0.0


def _count_bytes(optimizer: Optimizer) -> int:
    parameters: list[Any] = [one for group in optimizer.param_groups for one in group["params"]]
    tensors = [*parameters, *(value for state in optimizer.state.values() for value in state.values())]
    return sum(_local(tensor) for tensor in tensors if isinstance(tensor, Tensor))


def _local(tensor: Any) -> int:
    """Of a sharded tensor, the bytes of this rank's shard."""
    shard = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(shard.numel() * shard.element_size())
