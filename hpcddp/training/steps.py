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
from hpcddp.training.data.weighing import Weighing
from hpcddp.training.gradient.gradients import Gradients
from hpcddp.training.options import RunSetup
from hpcddp.training.parallel.layout import Layout
from hpcddp.training.stopping import REQUESTS, STOP_FLAGS

# A few numbers summed over the ranks one step late, so that no rank waits for them.


class LaggedSum:
    """`push` starts the sum of this step over all ranks; `pull` returns the one pushed before. Every rank calls both in
    the same order.

    On CUDA the sum goes through a pinned buffer and an event, so the host waits for the step before and never for this
    one. Numbers of a single rank that are on the host stay as they are.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._work: dist.Work | None = None
        self._values: Tensor | list[float] | None = None
        self._copied: torch.cuda.Event | None = None

    def push(self, values: Tensor | list[float]) -> None:
        """Start the sum of a float64 vector; pull the one before first."""
        self._values = values
        if isinstance(values, list):
            if self._world_size == 1:
                return
            self._values = values = torch.tensor(values, dtype=torch.float64)
        if self._world_size > 1:
            self._work = dist.all_reduce(values, async_op=True)
        if values.is_cuda:
            if self._work is not None:
                self._work.wait()  # orders the streams; does not stop the host
                self._work = None
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch does not annotate it
            self._copied.record()

    def peek(self) -> list[float] | None:
        """The sums pushed last, or None if none are under way; waits for them."""
        if isinstance(self._values, Tensor):
            with waiting():
                if self._work is not None:
                    self._work.wait()
                if self._copied is not None:
                    self._copied.synchronize()
            self._values = self._values.tolist()
            self._work = self._copied = None
        return self._values

    def pull(self) -> list[float] | None:
        """The same, once."""
        numbers, self._values = self.peek(), None
        return numbers


_MOST_STEPS = 8  # that share an exchange
_SHARED_S = 0.05  # how long they may take together
_FLAGS = STOP_FLAGS + REQUESTS
_SETTLING = 50  # steps of an attempt that have one each: they are not all alike, and a short run keeps its exact steps


class StepResult(NamedTuple):
    """The sums of a step: `numbers` of `add_step` with the global loss."""

    numbers: dict[str, Any]
    samples: int
    sums: dict[str, float]  # of `more`


class Exchanged(NamedTuple):
    """What an exchange brought: the steps that it was for, and a reason to stop that a rank had, or None."""

    steps: list[StepResult]
    stop: str | None = None


class _Pending(NamedTuple):
    """A step whose sums are not known yet: its notes, its samples, and the names of its numbers after the losses."""

    notes: dict[str, Any]
    samples: int
    names: tuple[str, ...]


class StepSum:
    """Collects the steps' losses on the device and exchanges them with the stop flags.

    All ranks take part, so that a signal to any of them stops all; of the ranks with one data rank, only the first adds
    its loss. With several `slots`, each filled by one data rank only, the loss does not depend on the order of the sum.
    On a CPU the numbers stay Python's own, since a tensor operation takes longer than all of this.
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
        self._sum = LaggedSum(layout.world_size)
        self._is_heard = False  # whether a rank had a request in an exchange that was drained
        self._is_counted = layout.is_counted
        self._is_first = layout.rank == 0
        self._device = device
        self._slots = slots
        self._averaged_over = averaged_over
        self._clock = clock
        self._host_loss = [0.0] * slots
        self._loss = torch.zeros(slots, dtype=torch.float64, device=device)
        self._numbers: list[float] = []  # of the steps that wait for an exchange, on a CPU
        self._tensors: list[Tensor] = []  # the same on a GPU
        self._waiting: list[_Pending] = []
        self._pushed: list[_Pending] = []
        self._steps = 0
        self._last_time = self._last_push = clock()

    def add_loss(self, loss: Tensor, weight: float | Tensor, slot: int = 0) -> None:
        """The loss of one micro batch, and the weight that its backward pass had; stays on the device."""
        part = weight / self._averaged_over
        if self._device.type == "cpu":
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
        if self._device.type == "cpu":
            loss, self._host_loss = self._host_loss, [0.0] * self._slots
            numbers = [*loss, *map(float, more.values())]
            self._numbers += numbers if self._is_counted else [0.0] * len(numbers)
        else:
            self._add_device(list(more.values()))
        now = self._clock()
        notes["samples_per_s"] = round(samples / max(now - self._last_time, 1e-9), 1)
        self._last_time = now
        self._steps += 1
        self._waiting.append(_Pending(notes, samples, tuple(more)))
        return len(self._waiting) >= self.steps_shared

    def exchange(self, flags: tuple[str, ...]) -> Exchanged:
        """Start the sums of the steps that wait for it, and return the exchange before."""
        before = self.drain()
        more_shared = self._propose() - 1 if self._is_first else 0
        votes = [float(flag in flags) for flag in _FLAGS] if flags else [0.0] * len(_FLAGS)
        votes.append(float(more_shared))
        on_cpu = self._device.type == "cpu"
        self._sum.push([*self._numbers, *votes] if on_cpu else torch.cat((*self._tensors, self._to_device(votes))))
        self._numbers, self._tensors = [], []
        self._pushed, self._waiting = self._waiting, []
        return before

    @property
    def has_waiting(self) -> bool:
        """Whether steps wait for an exchange; the same on every rank."""
        return bool(self._waiting)

    def drain(self) -> Exchanged:
        """What was started last, if anything; waits for it."""
        numbers = self._sum.pull()
        if numbers is None:
            return Exchanged([])
        steps = []
        for pending in self._pushed:
            losses, rest = numbers[: self._slots], numbers[self._slots :]
            sums, numbers = rest[: len(pending.names)], rest[len(pending.names) :]
            named = dict(zip(pending.names, sums, strict=True))
            loss = losses[0] if self._slots == 1 else _add_up(losses)
            steps.append(StepResult({**pending.notes, "loss": loss}, pending.samples, named))
        self._pushed = []
        *votes, more_shared = numbers
        self.steps_shared = 1 + int(more_shared)
        if not any(votes):
            return Exchanged(steps)
        flags = {flag: int(n) for flag, n in zip(_FLAGS, votes, strict=True)}
        self._is_heard |= any(flags[request] for request in REQUESTS)
        return Exchanged(steps, next((flag for flag in STOP_FLAGS if flags[flag]), None))

    def peek(self) -> dict[str, int]:
        """How many ranks had each of REQUESTS in the exchange under way; waits for it. A rank may do so alone."""
        numbers = self._sum.peek()
        votes = numbers[-1 - len(_FLAGS) : -1] if numbers is not None else [0.0] * len(_FLAGS)
        return {flag: int(n) for flag, n in zip(_FLAGS, votes, strict=True) if flag in REQUESTS}

    def take_heard(self) -> bool:
        """Whether, since this was asked last, all ranks have heard of a request of one. The same on every rank."""
        heard, self._is_heard = self._is_heard, False
        return heard

    def _propose(self) -> int:
        """How many steps the exchange after the next one is to be for."""
        now, steps = self._clock(), len(self._waiting)
        took, self._last_push = now - self._last_push, now
        if self._steps < _SETTLING:
            return 1
        return max(1, min(_MOST_STEPS, int(_SHARED_S * steps / max(took, 1e-9))))

    def _add_device(self, more: list[Tensor | float]) -> None:
        also = [torch.as_tensor(value, dtype=torch.float64, device=self._device).reshape(1) for value in more]
        numbers = torch.cat((self._loss, *also))  # a copy
        self._tensors.append(numbers if self._is_counted else torch.zeros_like(numbers))
        self._loss.zero_()

    def _to_device(self, votes: list[float]) -> Tensor:
        """Zeros are made there; others are copied, and the host does not wait for that."""
        if any(votes):
            pinned = torch.tensor(votes, dtype=torch.float64, pin_memory=self._device.type == "cuda")
            return pinned.to(self._device, non_blocking=True)
        return torch.zeros(len(votes), dtype=torch.float64, device=self._device)


def _add_up(losses: list[float]) -> float:
    """The correctly rounded sum, which does not depend on the order."""
    return math.fsum(losses) if all(map(math.isfinite, losses)) else sum(losses)


class StepRecord:
    """Sums what the ranks measure in a step, and writes it to metrics.jsonl."""

    def __init__(self, setup: RunSetup, gradients: Gradients, metrics: MetricsFile) -> None:
        self._metrics = metrics
        self.is_written = metrics.is_open  # to a file, on rank 0
        self.loss: float | None = None  # of the newest step whose sums are known
        device, averaged_over = setup.group.device, gradients.averaged_over
        self.sums = StepSum(setup.layout, device, gradients.slots, averaged_over=averaged_over)

    def exchange(self, flags: tuple[str, ...], weighing: Weighing) -> str | None:
        """Start the sums of the steps that wait for it, and write those before; returns the reason to stop that a rank
        had in them."""
        return self._write(self.sums.exchange(flags), weighing)

    def note_model(self, model: object) -> None:
        """What a model says that a sample costs, forward and backward: its `flops_per_sample`."""
        flops = getattr(model, "flops_per_sample", None)
        if isinstance(flops, int | float):
            self._metrics.write("model", flops_per_sample=float(flops))

    def catch_up(self, weighing: Weighing | None) -> str | None:
        """Write the steps so far: a checkpoint does not come before its steps. Returns the reason to stop that a rank
        had in them. Waits for the last exchange; call it on every rank at the same step."""
        before = self._write(self.sums.exchange(()), weighing) if self.sums.has_waiting else None
        now = self._write(self.sums.drain(), weighing)
        return before or now

    def _write(self, exchanged: Exchanged, weighing: Weighing | None) -> str | None:
        """The results are the same on every rank; rank 0 has a file to write them to."""
        if weighing is None:
            return None
        rows = [one.numbers | (weighing.learn(one.sums) if one.sums else {}) for one in exchanged.steps]
        if rows:
            self.loss = exchanged.steps[-1].numbers["loss"]
            if self.is_written:
                self._metrics.write_rows("step", rows)
        return exchanged.stop
