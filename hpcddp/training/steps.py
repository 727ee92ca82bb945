"""The sums of each optimizer step over the ranks, and what the ranks agree on with them: no rank waits for them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpcddp.errors import RequestError
from hpcddp.runs.hang import name_ranks
from hpcddp.runs.metrics import MetricsFile
from hpcddp.training.activity import waiting
from hpcddp.training.collectives import ask_all
from hpcddp.training.gradient.gradients import Gradients
from hpcddp.training.options import RunSetup, refuse_others
from hpcddp.training.stopping import REQUESTS, STOP_FLAGS

FLAGS = STOP_FLAGS + REQUESTS


class Agreement:
    """Flags of all ranks, which travel with a step's sums and are known one step later; and places of the script where
    all ranks agree at once. `group`: the ranks' process group, None: torch's default one."""

    def __init__(self, world_size: int, group: dist.ProcessGroup | None = None) -> None:
        self._world_size, self._group = world_size, group
        self.requests: dict[str, str] = {}  # of this rank, with their reasons
        self.requested: set[str] = set()  # requests of any rank in the exchanges since the ranks have agreed
        self._evaluations: list[Mapping[str, Any]] = []  # options of this rank's evaluation loaders, since then

    def encode(self, flags: Sequence[str]) -> list[float]:
        """This rank's part of an exchange: its reasons to stop and its requests, of FLAGS."""
        return [float(flag in flags) for flag in FLAGS] if flags else [0.0] * len(FLAGS)

    def decode(self, votes: Sequence[float]) -> str | None:
        """Read an exchange: the first reason to stop that a rank had, if any. Requests go into `requested`."""
        if not any(votes):
            return None
        raised = [flag for flag, vote in zip(FLAGS, votes, strict=True) if vote]
        self.requested.update(flag for flag in raised if flag in REQUESTS)
        return next((flag for flag in raised if flag in STOP_FLAGS), None)

    def record_evaluation(self, options: Mapping[str, Any]) -> None:
        """This rank has made an evaluation loader: the ranks compare its options when they agree next."""
        self._evaluations.append(options)

    def agree(self, place: str, mine: Any = None) -> tuple[dict[str, str], list[Any]]:
        """A collective: the requests of all ranks with a reason for each, and what each rank has as `mine`.

        RequestError, on every rank, if they call it at different places, or have made evaluation loaders with other
        options.
        """
        requests, self.requests = self.requests, {}
        evaluations, self._evaluations = self._evaluations, []
        self.requested.clear()
        everyones = ask_all((place, requests, mine, evaluations), self._world_size, self._group)
        if len({theirs[0] for theirs in everyones}) > 1:
            raise _went_apart([theirs[0] for theirs in everyones])
        granted: dict[str, str] = {}
        for _, theirs, *_ in reversed(everyones):
            granted |= theirs
        if len({len(theirs[3]) for theirs in everyones}) == 1:  # else one rank has made one for itself, to look
            for options in zip(*(theirs[3] for theirs in everyones), strict=True):
                refuse_others(options, "evaluation data: the same DataLoader(…, {}), over the whole data set,")
        return granted, [theirs[2] for theirs in everyones]


def _went_apart(places: Sequence[str]) -> RequestError:
    ranks_at = {place: [rank for rank, theirs in enumerate(places) if theirs == place] for place in places}
    return RequestError(
        "the ranks went different ways: "
        + ", ".join(f"{name_ranks(ranks)} {place}" for place, ranks in ranks_at.items()),
        "call it on every rank alike, as by if rt.broadcast(is_enough): break. rt.finish_early(reason),"
        " rt.stop(reason) and rt.save() may be called on one rank in the loop",
    )


class StepRecord:
    """Sums what the ranks measure in a step together with their flags, and writes it to metrics.jsonl a step later.

    All ranks take part, so that a signal to any of them stops all; of the ranks with one data rank, only the first adds
    its loss. Each of several slots is filled by one data rank only: the loss does not depend on the order of the sum.
    On a CPU the numbers stay Python's own, since a tensor operation takes longer than all of this. On a GPU they go
    through a pinned buffer and an event: the host waits for the step before, and never for this one.
    """

    def __init__(self, setup: RunSetup, gradients: Gradients, metrics: MetricsFile, agreement: Agreement) -> None:
        layout, self._device = setup.layout, setup.group.device
        self._metrics, self._agreement = metrics, agreement
        self.is_written = metrics.is_open  # to a file, on rank 0
        self.loss: float | None = None  # of the newest step whose sums are known
        #: The entries for metrics.jsonl, by the other sums of a step.
        self.learn: Callable[[Mapping[str, float]], dict[str, float | None]] = dict
        self._world_size, self._is_counted = layout.world_size, layout.is_counted
        self._on_cpu = self._device.type == "cpu"
        self._slots, self._averaged_over = gradients.slots, gradients.averaged_over
        self._host_loss = [0.0] * self._slots
        self._loss = torch.zeros(self._slots, dtype=torch.float64, device=self._device)
        self._sums: Tensor | list[float] | None = None  # of the step before; None: they are written
        self._notes: dict[str, Any] = {}  # of that step
        self._names: tuple[str, ...] = ()  # of its other numbers
        self._work: dist.Work | None = None
        self._copied: torch.cuda.Event | None = None
        self._last_time = time.monotonic()

    def record_model(self, model: object) -> None:
        """Record a model's cost of a sample, forward and backward: its `flops_per_sample`."""
        flops = getattr(model, "flops_per_sample", None)
        if isinstance(flops, int | float):
            self._metrics.write("model", flops_per_sample=float(flops))

    def add_loss(self, loss: Tensor, weight: float | Tensor, slot: int = 0) -> None:
        """The loss of one micro batch, and the weight that its backward pass had; stays on the device."""
        part = weight / self._averaged_over
        if self._on_cpu:
            self._host_loss[slot] += float(part) * float(loss)
        elif isinstance(part, Tensor):
            self._loss[slot].add_(loss.to(self._device).double() * part)
        else:
            self._loss[slot].add_(loss.to(self._device), alpha=part)

    def end_step(
        self, samples: int, flags: Sequence[str], more: Mapping[str, Tensor | float], **notes: Any
    ) -> str | None:
        """Start the sums of a step, and write the one before; returns the reason to stop that a rank had in that.

        `more` is summed over the data ranks too: the same names on every rank. `notes` are written with the sums.
        """
        reason = self.catch_up()
        if self.is_written:
            before, self._last_time = self._last_time, time.monotonic()
            rate = round(samples / max(self._last_time - before, 1e-9), 1)
            self._notes = notes | {"samples_per_s": rate}
        self._names = tuple(more)
        start = self._start_on_host if self._on_cpu else self._start_on_device
        start(list(more.values()), self._agreement.encode(flags))
        return reason

    def _start_on_host(self, more: list[Tensor | float], votes: list[float]) -> None:
        loss, self._host_loss = self._host_loss, [0.0] * self._slots
        numbers = [*loss, *map(float, more)]
        self._sums = [*(numbers if self._is_counted else [0.0] * len(numbers)), *votes]
        if self._world_size > 1:
            self._sums = torch.tensor(self._sums, dtype=torch.float64)
            self._work = dist.all_reduce(self._sums, async_op=True)

    def _start_on_device(self, more: list[Tensor | float], votes: list[float]) -> None:
        also = [torch.as_tensor(value, dtype=torch.float64, device=self._device).reshape(1) for value in more]
        numbers = torch.cat((self._loss, *also))  # a copy
        self._loss.zero_()
        host = torch.tensor(votes, dtype=torch.float64, pin_memory=True)
        counted = numbers if self._is_counted else torch.zeros_like(numbers)
        sums = torch.cat((counted, host.to(self._device, non_blocking=True)))
        if self._world_size > 1:
            dist.all_reduce(sums, async_op=True).wait()  # orders the streams; does not stop the host
        self._sums = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
        self._sums.copy_(sums, non_blocking=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._copied.record()

    def _wait(self) -> list[float] | None:
        if isinstance(self._sums, Tensor):
            with waiting():
                if self._work is not None:
                    self._work.wait()
                if self._copied is not None:
                    self._copied.synchronize()
            self._sums, self._work, self._copied = self._sums.tolist(), None, None
        return self._sums

    def all_request(self) -> bool:
        """Whether all ranks had the same request in the last step. Waits for its sums; no collective."""
        votes = (self._wait() or [])[-len(REQUESTS) :]
        return self._world_size in votes

    def catch_up(self) -> str | None:
        """Wait for the sums of the last step, if they are not written, and write them: a checkpoint does not come
        before its steps. Returns the reason to stop that a rank had in it. Call it on every rank at the same step."""
        numbers = self._wait() if isinstance(self._sums, Tensor) else self._sums
        self._sums = None
        if numbers is None:
            return None
        losses, numbers = numbers[: self._slots], numbers[self._slots :]
        sums = dict(zip(self._names, numbers, strict=False))
        self.loss = math.fsum(losses) if all(map(math.isfinite, losses)) else sum(losses)  # in any order the same
        if self.is_written:
            self._metrics.write("step", **self._notes, **{"loss": self.loss} | (self.learn(sums) if sums else {}))
        return self._agreement.decode(numbers[len(self._names) :])
