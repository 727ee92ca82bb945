"""What the stages of one pipeline send each other: outputs on to the next stage, their gradients back.

Each message of outputs begins with their types and shapes, so that micro batches may differ in size. Both directions
have a process group of their own: NCCL sends in order, and one of both directions would wait for itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpcddp.errors import RequestError
from hpcddp.training.parallel.layout import Layout
from hpcddp.training.parallel.spread import as_bytes

_TYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
_HEADER = 256  # whole numbers that describe a message's tensors


class StageLinks:
    """This rank's stage in its pipeline, and the ranks of the stages beside it."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        """A collective: every rank takes part in making all groups."""
        lines = layout.lines_along("pipeline")
        nth = next(nth for nth, line in enumerate(lines) if layout.rank in line)
        groups: list[tuple[Any, Any]] = [(dist.new_group(line), dist.new_group(line)) for line in lines]
        self.group, self._back = groups[nth]
        self._line = lines[nth]
        self.stage = self._line.index(layout.rank)
        self.stages = len(self._line)
        self.device = device
        self._sent: deque[list[tuple[Any, Tensor]]] = deque()  # message by message

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    @property
    def is_beside_first(self) -> bool:
        """Whether rank 0 has the first stage of this pipeline."""
        return self._line[0] == 0

    def give(self, tensor: Tensor) -> None:
        """To the first stage, which `take`s it."""
        content = as_bytes(tensor.detach().to(self.device).contiguous())
        if content.numel():
            dist.send(content, self._line[0], group=self.group)

    def take(self, empty: Tensor, stage: int) -> Tensor:
        """What the stage gives, of this shape and type."""
        taken = torch.empty(empty.shape, dtype=empty.dtype, device=self.device)
        if taken.numel():
            dist.recv(as_bytes(taken), self._line[stage], group=self.group)
        return taken

    def send_on(self, tensors: Sequence[Tensor]) -> None:
        """To the next stage. Does not wait for it."""
        self._send([_describe(tensors, self.device), *tensors], self._line[self.stage + 1], self.group)

    def receive(self, expected: Sequence[Tensor]) -> list[Tensor]:
        """From the stage before: tensors of the expected shapes."""
        before = self._line[self.stage - 1]
        header = torch.empty(_HEADER, dtype=torch.int64, device=self.device)
        dist.recv(header, before, group=self.group)
        received = self._make_room(header, expected)
        for tensor in received:
            if tensor.numel():
                dist.recv(as_bytes(tensor.detach()), before, group=self.group)
        return received

    def send_back(self, gradients: Sequence[Tensor]) -> None:
        """To the stage before, whose tensors of these shapes have taken part. Does not wait for it."""
        self._send(gradients, self._line[self.stage - 1], self._back)

    def receive_back(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of the outputs, from the next stage."""
        gradients = [torch.empty_like(output, memory_format=torch.contiguous_format) for output in outputs]
        for gradient in gradients:
            if gradient.numel():
                dist.recv(as_bytes(gradient), self._line[self.stage + 1], group=self._back)
        return gradients

    def share(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Those of the last stage, on all; the others give theirs as the expected shapes. A collective."""
        last = self._line[-1]
        header = _describe(tensors if self.is_last else [], self.device)
        dist.broadcast(header, last, group=self.group)
        shared = [t.detach().contiguous() for t in tensors] if self.is_last else self._make_room(header, tensors)
        for tensor in shared:
            if tensor.numel():
                dist.broadcast(as_bytes(tensor.detach()), last, group=self.group)
        return shared

    def settle(self) -> None:
        """Wait until all that was sent has arrived."""
        while self._sent:
            self._end_oldest()

    def _send(self, tensors: Sequence[Tensor], rank: int, group: Any) -> None:
        contents = [as_bytes(tensor.detach().contiguous()) for tensor in tensors if tensor.numel()]
        self._sent.append([(dist.isend(content, rank, group=group), content) for content in contents])
        # the stages are never so far apart that the other does not take it before it needs something of this one
        while len(self._sent) > 4 * self.stages:
            self._end_oldest()

    def _end_oldest(self) -> None:
        for work, _ in self._sent.popleft():
            work.wait()

    def _make_room(self, header: Tensor, expected: Sequence[Tensor]) -> list[Tensor]:
        """Empty tensors for those that a header describes. RequestError if the shapes are others than expected."""
        described = _read(header.tolist())
        shapes = [shape for _, _, shape in described]
        if shapes != [tuple(tensor.shape) for tensor in expected]:
            raise RequestError(
                f"stage {self.stage} of the pipeline expects tensors of shapes"
                f" {[tuple(tensor.shape) for tensor in expected]}, and gets {shapes}",
                "a forward pass that computes the same on every stage: shapes that depend on the input's shapes only",
            )
        return [
            torch.empty(shape, dtype=dtype, device=self.device).requires_grad_(needs_gradient)
            for dtype, needs_gradient, shape in described
        ]


def _describe(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """(count, then of each: type, whether it takes a gradient, dimensions, shape)."""
    numbers = [len(tensors)]
    for tensor in tensors:
        numbers += [_TYPES.index(tensor.dtype), int(tensor.requires_grad), tensor.dim(), *tensor.shape]
    if len(numbers) > _HEADER:
        raise RequestError(
            f"one stage of the pipeline would give {len(tensors)} tensors to the next", "join them: torch.cat, or fewer"
        )
    return torch.tensor([*numbers, *[0] * (_HEADER - len(numbers))], device=device)


def _read(numbers: list[int]) -> list[tuple[torch.dtype, bool, tuple[int, ...]]]:
    count, *rest = numbers
    found = []
    for _ in range(count):
        dtype, needs_gradient, dimensions = rest[:3]
        found.append((_TYPES[dtype], bool(needs_gradient), tuple(rest[3 : 3 + dimensions])))
        rest = rest[3 + dimensions :]
    return found
