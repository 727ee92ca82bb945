"""Micro batches on their way to the device: beside the computation, on a CUDA stream of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from hpcddp.training.data.move import find_tensors, move
from hpcddp.training.data.sampler import MicroBatch
from hpcddp.training.data.weighing import Loaded, Weight

Moved = tuple[MicroBatch, Weight, Any]


class Copies(Protocol):
    """Starts a copy to the device, and hands it over to the computation later."""

    def start(self, content: Any) -> Callable[[], Any]:
        """Begin to copy. Calling the result, once and just before it is used, gives what lies on the device."""


class StreamCopies:
    """Copies on a CUDA stream of their own, beside what the current stream computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch does not annotate it

    def start(self, content: Any) -> Callable[[], Any]:
        if find_tensors(content) is None:  # nobody could tell the allocator about the copies that it makes itself
            return lambda: move(content, self._device)
        with torch.cuda.stream(self._stream):
            moved = move(content, self._device)
            copied = self._stream.record_event()

        def hand_over() -> Any:
            using = torch.cuda.current_stream(self._device)
            using.wait_event(copied)
            for tensor in find_tensors(moved) or ():
                if tensor.is_cuda:
                    tensor.record_stream(using)  # its memory is free again when this stream is done with it
            return moved

        return hand_over


class PlainCopies:
    """Copies when they are needed: on a CPU there is nothing to copy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self, content: Any) -> Callable[[], Any]:
        return lambda: move(content, self._device)


def open_copies(device: torch.device) -> Copies:
    return StreamCopies(device) if device.type == "cuda" else PlainCopies(device)


def move_all(weighed: Iterator[tuple[Loaded, Weight]], copies: Copies, *, ahead: bool) -> Iterator[Moved]:
    """Every micro batch on the device. With `ahead` the copy of the next has begun when one is given out."""
    waiting: tuple[MicroBatch, Weight, Callable[[], Any]] | None = None
    for loaded, weight in weighed:
        started = loaded.micro, weight, copies.start(loaded.content)
        if not ahead:
            yield loaded.micro, weight, started[2]()
            continue
        if waiting is not None:
            yield waiting[0], waiting[1], waiting[2]()
        waiting = started
    if waiting is not None:
        yield waiting[0], waiting[1], waiting[2]()
