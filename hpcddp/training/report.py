"""What rank 0 says of a run on stderr, and where the run's numbers go: from the first line to the summary."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from shutil import get_terminal_size

from hpcddp.runs.folder import list_checkpoints
from hpcddp.runs.metrics import MetricsFile, check_numbers
from hpcddp.training.pace import Pace
from hpcddp.training.progress import Progress
from hpcddp.training.setup import RunSetup
from hpcddp.training.sinks import SinkRequest, Sinks
from hpcddp.training.summary import RunStart, Summary, format_start, format_summary


class Report:
    """The start line, the progress, the numbers of `rt.log`, and the summary. Its methods are called on every rank."""

    def __init__(
        self,
        setup: RunSetup,
        metrics: MetricsFile,
        pace: Pace,
        *,
        sinks: Sequence[str] = (),
        interval_s: float | None = None,
        deadline: Callable[[], float | None] = lambda: None,
    ) -> None:
        """`interval_s` is that of `Progress`, `deadline` too; `sinks` are names of `choose_sinks`."""
        self.more: dict[str, str] = {}  # lines of the caller's for the summary
        self._setup = setup
        self._metrics = metrics
        self._pace = pace
        self._names = sinks
        self._sinks = Sinks((), None)
        self._progress = Progress(
            sys.stderr if setup.group.is_first else None,
            interval_s=interval_s,
            save_every=setup.options.save_every.steps,
            deadline=deadline,
            columns=lambda: get_terminal_size().columns,
        )
        self._began = time.monotonic()
        self._samples = 0  # of this attempt's steps but the first, which the pace does not count either
        self._is_first_step = True
        self._has_started = self._has_ended = False

    def start(self, plan: str, resumed_from: int | None) -> None:
        """The run's objects are there, from this step's checkpoint or new: say so, and open the sinks."""
        self._has_started = True
        folder, group = self._setup.folder, self._setup.group
        self.say(
            format_start(RunStart(folder is not None, resumed_from, plan, group.describe() if self._speaks else ""))
        )
        if self._speaks and folder is not None:
            self._sinks = Sinks(self._names, SinkRequest(os.path.abspath(folder.run.path), resumed_from or 0))

    def expect(self, step: int, epochs: int, length: int | None, position: int, batch: int) -> None:
        """After `step` steps there are this many `epochs` left of `length` samples each, in global batches of `batch`.
        `position` samples of the first one are done. `length` None: it is not known."""
        if length is not None:
            total = step + -(-(length - position) // batch) + (epochs - 1) * -(-length // batch)
            if total != self._progress.total_steps:
                self._metrics.write("expect", total_steps=total)
            self._progress.total_steps = total

    def step(self, step: int, samples: int, loss: float | None) -> None:
        """Step number `step` was made, of `samples` samples over all ranks."""
        if self._is_first_step:
            self._is_first_step = False
        else:
            self._samples += samples
        self._progress.step(step, samples, loss)

    def log(self, step: int, numbers: Mapping[str, object]) -> None:
        """The caller's numbers. RequestError, on every rank, for what is no number."""
        checked = check_numbers(numbers)
        self._metrics.log(step, checked)
        self._sinks.write(step, checked)

    def clear(self) -> None:
        """Something else is printed next."""
        self._progress.clear()

    def say(self, text: str) -> None:
        """One of hpcddp's own lines."""
        if self._speaks:
            self.clear()
            print(f"hpcddp: {text}", file=sys.stderr, flush=True)

    def end(self, summary: Summary) -> None:
        """The attempt is over, without an error: close the sinks and print the summary, once."""
        if self._has_ended or not self._has_started:
            return
        self._has_ended = True
        self._sinks.close("unfinished" if summary.stop_reason else "finished")
        folder = self._setup.folder
        checkpoints = list_checkpoints(folder.run.checkpoints) if folder is not None and self._speaks else []
        training_s = self._pace.training_s
        summary = summary._replace(
            title=f"run {os.path.basename(os.path.abspath(folder.run.path))}" if folder is not None else "training",
            samples_per_s=self._samples / training_s if training_s else None,
            seconds=time.monotonic() - self._began,
            checkpoint=checkpoints[-1] if checkpoints else None,
            run=folder.run.path if folder is not None else None,
            resume_with="the same command again" if folder is not None else None,
        )
        self.say(format_summary(summary, tuple(self.more.items())))

    def fail(self) -> None:
        """The attempt is over with an error, which the caller prints."""
        self._has_ended = True
        self.clear()
        self._sinks.close("failed")

    @property
    def _speaks(self) -> bool:
        return self._setup.group.is_first
