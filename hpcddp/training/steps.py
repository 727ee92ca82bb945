"""The record of each optimizer step: its loss and other sums over the ranks, written one exchange late, and whether a
rank has to stop. No rank waits for them.

Short steps share an exchange: on a CPU one costs half a millisecond, as much as such a step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hpcddp.runs.metrics import MetricsFile
from hpcddp.training.activity import waiting
from hpcddp.training.gradient.gradients import Gradients
from hpcddp.training.options import RunSetup
from hpcddp.training.parallel.layout import Layout
from hpcddp.training.stopping import REQUESTS, STOP_FLAGS

_MOST_STEPS = 8  # that share an exchange
_SHARED_S = 0.05  # how long they may take together
_FLAGS = STOP_FLAGS + REQUESTS
_NO_VOTES = [0.0] * len(_FLAGS)
_SETTLING = 50  # steps of an attempt that have one each: they are not all alike, and a short run keeps its exact steps


class StepResult(NamedTuple):
    """The sums of a step: `numbers` of `add_step` with the global loss."""

    numbers: dict[str, Any]
    sums: dict[str, float]  # of `more`


class Exchanged(NamedTuple):
    """The result of an exchange: the steps that it was for, and a reason to stop that a rank had, or None."""

    steps: list[StepResult]
    stop: str | None = None


class StepSum:
    """Collects the steps' losses and exchanges them with the stop flags: `exchange` starts the sum over all ranks, and
    returns the one that was started before. Every rank calls it after the same steps.

    All ranks take part, so that a signal to any of them stops all; of the ranks with one data rank, only the first adds
    its loss. With several `slots`, each filled by one data rank only, the loss does not depend on the order of the sum.
    On a CPU the numbers stay Python's own, since a tensor operation takes longer than all of this. On a GPU they go
    through a pinned buffer and an event: the host waits for the exchange before, and never for this one.
    """

    def __init__(
        self,
        layout: Layout,
        device: torch.device,
        slots: int = 1,
        clock: Callable[[], float] = time.monotonic,
        averaged_over: int = 1,
    ) -> None:
        """`averaged_over`: the weights of losses are divided by it."""
        self.steps_shared = 1  # that the next exchange is for: rank 0 measures, and its number comes with each exchange
        self._world_size, self._is_first, self._is_counted = layout.world_size, layout.rank == 0, layout.is_counted
        self._device, self._on_cpu = device, device.type == "cpu"
        self._slots, self._averaged_over, self._clock = slots, averaged_over, clock
        self._host_loss = [0.0] * slots
        self._loss = torch.zeros(slots, dtype=torch.float64, device=device)
        self._numbers: list[float] = []  # of the steps that wait for an exchange, on a CPU
        self._tensors: list[Tensor] = []  # the same on a GPU
        self._waiting: list[tuple[dict[str, Any], tuple[str, ...]]] = []  # their notes, and the names of other numbers
        self._under_way: list[tuple[dict[str, Any], tuple[str, ...]]] = []  # those of the exchange under way
        self._sums: Tensor | list[float] | None = None  # of that; None: there is none
        self._work: dist.Work | None = None
        self._copied: torch.cuda.Event | None = None
        self._is_heard = False  # whether a rank had a request in an exchange that was drained
        self._steps = 0
        self._last_time = self._last_exchange = clock()

    def add_loss(self, loss: Tensor, weight: float | Tensor, slot: int = 0) -> None:
        """The loss of one micro batch, and the weight that its backward pass had; stays on the device."""
        part = weight / self._averaged_over
        if self._on_cpu:
            self._host_loss[slot] += float(part) * float(loss)
        elif isinstance(part, Tensor):
            self._loss[slot].add_(loss.to(self._device).double() * part)
        else:
            self._loss[slot].add_(loss.to(self._device), alpha=part)

    def add_step(self, samples: int, more: Mapping[str, Tensor | float] | None = None, **notes: Any) -> bool:
        """A step is over; whether it is time for an `exchange`, which is so on all ranks at the same step.

        `more` is summed over the data ranks too: the same names on every rank. `notes` are kept with the result.
        """
        more = more or {}
        if self._on_cpu:
            loss, self._host_loss = self._host_loss, [0.0] * self._slots
            numbers = [*loss, *map(float, more.values())]
            self._numbers += numbers if self._is_counted else [0.0] * len(numbers)
        else:
            self._add_on_device(list(more.values()))
        now = self._clock()
        notes["samples_per_s"] = round(samples / max(now - self._last_time, 1e-9), 1)
        self._last_time = now
        self._steps += 1
        self._waiting.append((notes, tuple(more)))
        return len(self._waiting) >= self.steps_shared

    def _add_on_device(self, more: list[Tensor | float]) -> None:
        also = [torch.as_tensor(value, dtype=torch.float64, device=self._device).reshape(1) for value in more]
        numbers = torch.cat((self._loss, *also))  # a copy
        self._tensors.append(numbers if self._is_counted else torch.zeros_like(numbers))
        self._loss.zero_()

    def exchange(self, flags: tuple[str, ...]) -> Exchanged:
        """Start the sums of the steps that wait for it, and return the exchange before."""
        before = self.drain()
        votes = [float(flag in flags) for flag in _FLAGS] if flags else [*_NO_VOTES]
        votes.append(self._propose() - 1.0 if self._is_first else 0.0)
        if self._on_cpu:
            self._sums, self._numbers = [*self._numbers, *votes], []
            if self._world_size > 1:
                self._sums = torch.tensor(self._sums, dtype=torch.float64)
                self._work = dist.all_reduce(self._sums, async_op=True)
        else:
            host = torch.tensor(votes, dtype=torch.float64, pin_memory=True)
            sums, self._tensors = torch.cat((*self._tensors, host.to(self._device, non_blocking=True))), []
            if self._world_size > 1:
                dist.all_reduce(sums, async_op=True).wait()  # orders the streams; does not stop the host
            self._sums = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
            self._sums.copy_(sums, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch does not annotate it
            self._copied.record()
        self._under_way, self._waiting = self._waiting, []
        return before

    @property
    def has_waiting(self) -> bool:
        """Whether steps wait for an exchange; the same on every rank."""
        return bool(self._waiting)

    def _wait(self) -> list[float] | None:
        """The numbers of the exchange under way."""
        if isinstance(self._sums, Tensor):
            with waiting():
                if self._work is not None:
                    self._work.wait()
                if self._copied is not None:
                    self._copied.synchronize()
            self._sums, self._work, self._copied = self._sums.tolist(), None, None
        return self._sums

    def drain(self) -> Exchanged:
        """Wait for the exchange that was started last, if any."""
        numbers, self._sums = self._wait(), None
        if numbers is None:
            return Exchanged([])
        steps, at = [], 0
        for notes, names in self._under_way:
            losses, at = numbers[at : at + self._slots], at + self._slots
            sums, at = dict(zip(names, numbers[at:], strict=False)), at + len(names)
            loss = losses[0] if self._slots == 1 else _add_up(losses)
            steps.append(StepResult(notes | {"loss": loss}, sums))
        self._under_way = []
        *votes, more_shared = numbers[at:]
        self.steps_shared = 1 + int(more_shared)
        raised = [flag for flag, vote in zip(_FLAGS, votes, strict=True) if vote]
        self._is_heard |= any(flag in REQUESTS for flag in raised)
        return Exchanged(steps, next((flag for flag in raised if flag in STOP_FLAGS), None))

    def count_requests(self) -> dict[str, int]:
        """How many ranks had each of REQUESTS in the exchange under way; waits for it. A rank may do so alone."""
        votes = (self._wait() or [*_NO_VOTES, 0.0])[-1 - len(REQUESTS) : -1]
        return dict(zip(REQUESTS, map(int, votes), strict=True))

    def take_heard(self) -> bool:
        """Whether, since this was asked last, all ranks have heard of a request of one. The same on every rank."""
        heard, self._is_heard = self._is_heard, False
        return heard

    def _propose(self) -> int:
        """How many steps the exchange after the next one is to be for."""
        now, steps = self._clock(), len(self._waiting)
        took, self._last_exchange = now - self._last_exchange, now
        if self._steps < _SETTLING:
            return 1
        return max(1, min(_MOST_STEPS, int(_SHARED_S * steps / max(took, 1e-9))))


def _add_up(losses: list[float]) -> float:
    """The correctly rounded sum, which does not depend on the order."""
    return math.fsum(losses) if all(map(math.isfinite, losses)) else sum(losses)


class StepRecord:
    """Sums what the ranks measure in a step, and writes it to metrics.jsonl."""

    def __init__(self, setup: RunSetup, gradients: Gradients, metrics: MetricsFile) -> None:
        self._metrics = metrics
        self.is_written = metrics.is_open  # to a file, on rank 0
        self.loss: float | None = None  # of the newest step whose sums are known
        #: The entries for metrics.jsonl, by the other sums of a step.
        self.learn: Callable[[Mapping[str, float]], dict[str, float | None]] = dict
        device, averaged_over = setup.group.device, gradients.averaged_over
        self.sums = StepSum(setup.layout, device, gradients.slots, averaged_over=averaged_over)

    def note_model(self, model: object) -> None:
        """Record a model's cost of a sample, forward and backward: its `flops_per_sample`."""
        flops = getattr(model, "flops_per_sample", None)
        if isinstance(flops, int | float):
            self._metrics.write("model", flops_per_sample=float(flops))

    def exchange(self, flags: tuple[str, ...]) -> str | None:
        """Start the sums of the steps that wait for it, and write those before; returns the reason to stop that a rank
        had in them."""
        return self._write(self.sums.exchange(flags))

    def catch_up(self) -> str | None:
        """Write the steps so far: a checkpoint does not come before its steps. Returns the reason to stop that a rank
        had in them. Waits for the last exchange; call it on every rank at the same step."""
        before = self._write(self.sums.exchange(())) if self.sums.has_waiting else None
        now = self._write(self.sums.drain())
        return before or now

    def _write(self, exchanged: Exchanged) -> str | None:
        """The results are the same on every rank; rank 0 has a file to write them to."""
        rows = [one.numbers | (self.learn(one.sums) if one.sums else {}) for one in exchanged.steps]
        if rows:
            self.loss = exchanged.steps[-1].numbers["loss"]
            if self.is_written:
                self._metrics.write_rows("step", rows)
        return exchanged.stop
