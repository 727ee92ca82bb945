"""What rank 0 says of a run on stderr, and where the run's numbers go: from the first line to the summary."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TextIO

from hpcddp.runs.folder import list_checkpoints
from hpcddp.runs.metrics import MetricsFile, check_logged
from hpcddp.training.setup import RunSetup
from hpcddp.training.sinks import SinkRequest, Sinks
from hpcddp.training.stopping import Pace

# The progress of a training: a line per interval.


DEFAULT_INTERVAL_S = 30.0
AT_TERMINAL_S = 2.0


class Standing(NamedTuple):
    """How far a training is. None: not known, and not shown."""

    step: int  # steps since the start of the run
    total_steps: int | None = None
    loss: float | None = None
    samples_per_s: float | None = None
    left_s: float | None = None  # until the last step, at the pace of this attempt
    save_at: int | None = None  # the step after which the next checkpoint is written
    walltime_left_s: float | None = None


def format_line(standing: Standing) -> str:
    """`step 1200/5000  loss 0.3123  5,210 samples/s  0:12:30 left  save at 1300  walltime left 1:02:03`."""
    s = standing
    parts = [f"step {s.step}" + (f"/{s.total_steps}" if s.total_steps is not None else "")]
    if s.loss is not None:
        parts.append(f"loss {s.loss:.4g}")
    if s.samples_per_s is not None:
        parts.append(f"{_format_rate(s.samples_per_s)} samples/s")
    if s.left_s is not None:
        parts.append(f"{format_seconds(s.left_s)} left")
    if s.save_at is not None:
        parts.append(f"save at {s.save_at}")
    if s.walltime_left_s is not None:
        parts.append(f"walltime left {format_seconds(s.walltime_left_s)}")
    return "  ".join(parts)


def format_seconds(seconds: float) -> str:
    """`H:MM:SS`, with days in front from one day on: `2d 03:04:05`. Nothing is below zero."""
    whole = max(0, int(seconds))
    days, rest = divmod(whole, 86400)
    clock = f"{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days}d {rest // 3600:02d}:{clock}" if days else f"{rest // 3600}:{clock}"


def _format_rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 10 else f"{per_s:.2g}"


class Progress:
    """Prints a line every `interval_s` seconds to `out`: how far a training is. Nothing if one of the two is None.

    `deadline` says when the job ends, in seconds since 1970: that may move. `clock` is in seconds, from anywhere.
    """

    def __init__(
        self,
        out: TextIO | None,
        *,
        interval_s: float | None = DEFAULT_INTERVAL_S,
        total_steps: int | None = None,
        save_every: int | None = None,
        deadline: Callable[[], float | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.total_steps = total_steps  # may become known later
        self._out = out
        self._interval_s = interval_s or DEFAULT_INTERVAL_S
        self._save_every = save_every
        self._deadline = deadline
        self._clock = clock
        self._now = now
        self._samples = 0
        # when to print; the first step sets it
        self._next = math.inf if out is None or interval_s is None else -math.inf
        self._first: tuple[float, int] | None = None  # time and number of the first step of this attempt
        self._mark = 0.0, 0  # time and samples when the last line was printed

    def step(self, step: int, samples: int, loss: float | None = None) -> None:
        """Step number `step` (from 1, over all attempts) was made, of `samples` samples over all ranks."""
        self._samples += samples
        at = self._clock()
        if at < self._next:
            return
        self._next = at + self._interval_s
        if self._first is None:  # the first step compiles and fills caches: it starts the clock and is not counted
            self._first = (at, step)
        else:
            self._write(f"hpcddp: {format_line(self._standing(at, step, loss))}\n")
        self._mark = at, self._samples

    def _standing(self, at: float, step: int, loss: float | None) -> Standing:
        began, before = self._mark
        left_s = None
        if self.total_steps is not None and self._first is not None and step > self._first[1]:
            pace_s = (at - self._first[0]) / (step - self._first[1])
            left_s = max(0, self.total_steps - step) * pace_s
        every, ends = self._save_every, self._deadline()
        return Standing(
            step,
            self.total_steps,
            loss,
            (self._samples - before) / (at - began) if at > began else None,
            left_s,
            step - step % every + every if every else None,
            ends - self._now() if ends is not None else None,
        )

    def _write(self, text: str) -> None:
        """Nobody to read it is no reason to end a training."""
        if self._out is None:
            return
        try:
            self._out.write(text)
            self._out.flush()
        except (OSError, ValueError):  # ValueError: the stream is closed
            self._out, self._next = None, math.inf


# What rank 0 prints when a run starts and when it ends, as text.


def format_first_line(plan: str, ranks: str, resumed_from: int | None, *, saves: bool) -> str:
    """One line: the batch plan, the ranks and their devices, and from which step the run resumes, if from any. Which
    run it is was said when its folder was chosen."""
    resumed = f"resumed from step {resumed_from}" if resumed_from is not None else None
    saved = None if saves else "no run folder: nothing is saved"
    return "; ".join(filter(None, [f"global batch: {plan}", ranks, resumed, saved]))


class Summary(NamedTuple):
    """What a run has come to in this attempt. None: not known, and not shown."""

    steps: int  # over all attempts
    title: str = ""  # what was trained
    stop_reason: str | None = None  # None: finished
    finish_reason: str | None = None  # why it finished before its last step
    epochs: int | None = None
    loss: float | None = None  # of the last step
    samples_per_s: float | None = None
    seconds: float | None = None  # of this attempt
    weights_sha256: str | None = None
    is_exact: bool = False
    checkpoint: str | None = None  # its folder
    run: str | None = None  # the run folder
    resume_with: str | None = None  # a command


def format_summary(summary: Summary) -> str:
    """The closing text, one fact a line."""
    s = summary
    # the launcher may have handed on another signal than the one that was sent, which state.json names at the job's end
    reason = "a signal" if (s.stop_reason or "").startswith("SIG") else s.stop_reason
    status = f"unfinished ({reason})" if reason else "finished"
    if s.finish_reason and not s.stop_reason:
        status += f" early ({s.finish_reason})"
    epochs = f", epoch {s.epochs}" if s.epochs is not None else ""
    weights = None
    if s.weights_sha256 is not None:
        weights = f"sha256 {s.weights_sha256}" + (", the same on any number of ranks" if s.is_exact else "")
    rows = [
        ("loss", f"{s.loss:.6g} in the last step" if s.loss is not None else None),
        ("speed", _format_speed(s)),
        ("weights", weights),
        ("saved", s.checkpoint),
        ("files", s.run),
        ("resume", s.resume_with if s.stop_reason else None),
    ]
    lines = [f"{s.title}: {status} after step {s.steps}{epochs}"]
    return "\n".join(lines + [f"  {name:<9} {text}" for name, text in rows if text])


def _format_speed(s: Summary) -> str | None:
    rate = f"{s.samples_per_s:,.0f} samples/s" if s.samples_per_s else ""
    took = f"{format_seconds(s.seconds)} in all" if s.seconds is not None else ""
    return ", ".join(filter(None, [rate, took])) or None


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
        )
        self._began = time.monotonic()
        self._samples = 0  # of this attempt's steps but the first, which the pace does not count either
        self._is_first_step = True
        self._has_started = self._has_ended = False

    def start(self, plan: str, resumed_from: int | None) -> None:
        """The run's objects are there, from this step's checkpoint or new: say so, and open the sinks."""
        self._has_started = True
        folder, group = self._setup.folder, self._setup.group
        self.say(format_first_line(plan, group.describe(), resumed_from, saves=folder is not None))
        if self._speaks and folder is not None:
            self._sinks = Sinks(self._names, SinkRequest(os.path.abspath(folder.run.path), resumed_from or 0))

    def expect(self, step: int, epochs: int, length: int | None, position: int, batch: int) -> None:
        """After `step` steps there are this many `epochs` left of `length` samples each, in global batches of `batch`.
        `position` samples of the first one are done. `length` None: it is not known."""
        if length is not None:
            self.expect_steps(step + -(-(length - position) // batch) + (epochs - 1) * -(-length // batch))

    def expect_steps(self, total: int) -> None:
        """The run ends after so many steps."""
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
        checked = check_logged(numbers)
        self._metrics.log(step, checked)
        self._sinks.write(step, checked)

    def say(self, text: str) -> None:
        """One of hpcddp's own lines."""
        if self._speaks:
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
        self.say(format_summary(summary))

    def fail(self) -> None:
        """The attempt is over with an error, which the caller prints."""
        self._has_ended = True
        self._sinks.close("failed")

    @property
    def _speaks(self) -> bool:
        return self._setup.group.is_first
