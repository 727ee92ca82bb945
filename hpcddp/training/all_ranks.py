"""What a training loop does across its ranks: sums, gathered rows, and what rank 0 says and records for all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hpcddp.errors import RequestError
from hpcddp.training import collectives
from hpcddp.training.agreement import Agreement
from hpcddp.training.loop import TrainingLoop
from hpcddp.training.report import Report
from hpcddp.training.setup import RunSetup


class AllRanks:
    """The part of a `Runtime` that is for all ranks together. Call its methods on every rank."""

    def __init__(self, setup: RunSetup, loop: TrainingLoop, report: Report) -> None:
        self.group = setup.group
        self.layout = setup.layout
        self.device = setup.group.device
        self._loop = loop
        self._report = report
        self._agreement = Agreement(setup.group)
        self._is_over = False

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All devices of this rank, `device` first: several where the job asks for `gpus_per_rank`."""
        return self.group.devices

    @property
    def rank(self) -> int:
        """This process's number, from 0."""
        return self.group.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.group.world_size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes."""
        return self.group.is_first

    @property
    def summary(self) -> dict[str, str]:
        """Lines, name to text, that the summary at the end has besides the runtime's own; those of rank 0 are shown."""
        return self._report.more

    def _end_body(self) -> None:
        """The `with` body has ended."""
        self._is_over = True

    def _check_open(self, call: str) -> None:
        """RequestError behind the `with` body: of several ranks each would have its own part only."""
        if self._is_over and self.layout.world_size > 1:
            raise RequestError(
                f"{call} came after the `with` body of hpcddp.runtime, when the ranks had parted",
                f"with hpcddp.runtime(…) as rt: …, with {call} at the end of the body",
            )

    def _agree_after_break(self) -> None:
        """Before a collective that a loop may have been left for; see `Saving`."""

    # ---- for all ranks together: call these on every rank

    def sum(self, value: collectives.Number) -> collectives.Number:
        """The sum over the data ranks, in float64, whole numbers in int64: of a number a number, of a tensor one of its
        shape.

        Waits for the device: once per epoch, not per step.
        """
        self._check_open("rt.sum")
        self._agree_after_break()
        return collectives.sum_over_data_ranks(value, self.layout, self.device)

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all data ranks, one below the other: all outputs of an evaluation in the order of its data.

        (n, …) on each rank gives (sum of n, …) on every rank; n may differ.
        """
        self._check_open("rt.gather")
        self._agree_after_break()
        return collectives.gather_rows(rows, self.layout, self.device)

    def broadcast(self, thing: collectives.Thing) -> collectives.Thing:
        """Rank 0's object, on every rank."""
        self._check_open("rt.broadcast")
        self._agree_after_break()
        return collectives.broadcast(thing, self.layout, self.device)

    # ---- on rank 0 only: call these on every rank all the same

    def print(self, *words: Any, **options: Any) -> None:
        """As `print`, on rank 0 only."""
        if self.is_main:
            self._report.clear()
            print(*words, **{"flush": True} | options)

    def log(self, *unnamed: object, **numbers: float | Tensor) -> None:
        """Write numbers, or tensors of one element, to metrics.jsonl and where `log_to` says.

        Their step is the last that an optimizer has made. Those of rank 0 count: sum them over the ranks first. To read
        a tensor waits for its device.
        """
        if unnamed:
            raise RequestError(
                f"rt.log was given a {type(unnamed[0]).__name__} without a name",
                "rt.log(loss=0.5), or rt.log(**numbers)",
            )
        self._report.log(self._loop.steps_made, numbers)
