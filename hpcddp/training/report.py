"""Rank 0's lines on stderr, from the first one to the summary, and the sinks of the run's numbers."""

from __future__ import annotations

import hashlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple, TextIO

from hpcddp.errors import RequestError, nearest
from hpcddp.runs.folder import list_checkpoints
from hpcddp.runs.metrics import MetricsFile, check_logged
from hpcddp.training.options import RunSetup
from hpcddp.training.stopping import Pace
from hpcddp.units import format_duration

DEFAULT_INTERVAL_S = 30.0  # between two lines of progress
AT_TERMINAL_S = 2.0


def print_warning(warning: object | None, *, is_first: bool) -> None:
    """Print a warning, if there is one, to stderr of rank 0."""
    if warning is not None and is_first:
        print(f"hpcddp: warning: {warning}", file=sys.stderr)


class Progress:
    """Prints a line every `interval_s` seconds to `out`: how far a training is. Nothing if one of the two is None.

    `deadline` says when the job ends, in seconds since 1970, as `clock`: that may move.
    """

    def __init__(
        self,
        out: TextIO | None,
        *,
        interval_s: float | None = DEFAULT_INTERVAL_S,
        deadline: Callable[[], float | None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.total_steps: int | None = None  # may become known later
        self._out, self._interval_s = out, interval_s or DEFAULT_INTERVAL_S
        self._deadline, self._clock = deadline, clock
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
            self._write(f"hpcddp: {'  '.join(self._list_parts(at, step, loss, *self._first))}\n")
        self._mark = at, self._samples

    def _list_parts(self, at: float, step: int, loss: float | None, first_at: float, first: int) -> list[str]:
        """`step 1200/5000`, `loss 0.3123`, `5,210 samples/s`, `00:12:30 left`, `walltime left 01:02:03`."""
        (began, before), total, ends = self._mark, self.total_steps, self._deadline()
        parts = [f"step {step}" if total is None else f"step {step}/{total}"]
        if loss is not None:
            parts.append(f"loss {loss:.4g}")
        if at > began:
            rate = (self._samples - before) / (at - began)
            parts.append(f"{rate:{',.0f' if rate >= 10 else '.2g'}} samples/s")
        if total is not None and step > first:
            parts.append(f"{format_duration((total - step) * (at - first_at) / (step - first))} left")
        if ends is not None:
            parts.append(f"walltime left {format_duration(ends - at)}")
        return parts

    def _write(self, text: str) -> None:
        assert self._out is not None
        try:
            self._out.write(text)
            self._out.flush()
        except (OSError, ValueError):  # a closed pipe or stream does not end a training
            self._next = math.inf


# ---- sinks


class Sink(NamedTuple):
    """A place besides metrics.jsonl for the numbers of `rt.log`, on rank 0. A resumed run continues the same run there:
    TensorBoard's by its folder, MLflow's by a tag, W&B's by an id."""

    write: Callable[[int, Mapping[str, float]], object]  # after so many steps
    close: Callable[[str], object]  # the attempt is over: finished, unfinished or failed


def _name_run(folder: str) -> str:
    return os.path.basename(os.path.normpath(folder))


def _hash_path(folder: str) -> str:
    """An id that is the same for each attempt of a run."""
    return hashlib.sha256(os.path.realpath(folder).encode()).hexdigest()[:16]


def _open_tensorboard(folder: str, step: int) -> Sink:
    module = import_module("torch.utils.tensorboard")
    # a resumed run makes the steps after its checkpoint again: TensorBoard drops those of the attempt before
    writer: Any = module.SummaryWriter(os.path.join(folder, "tensorboard"), purge_step=step + 1)

    def write(step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)

    return Sink(write, lambda _status: writer.close())  # TensorBoard has no word for the status


def _open_mlflow(folder: str, _step: int) -> Sink:
    mlflow: Any = import_module("mlflow")
    tag = _hash_path(folder)
    found = mlflow.search_runs(filter_string=f"tags.hpcddp_run = '{tag}'", max_results=1, output_format="list")
    if found:
        mlflow.start_run(run_id=found[0].info.run_id)
    else:
        mlflow.start_run(run_name=_name_run(folder), tags={"hpcddp_run": tag})
    ends = {"finished": "FINISHED", "unfinished": "KILLED", "failed": "FAILED"}
    return Sink(
        lambda step, numbers: mlflow.log_metrics(dict(numbers), step=step),
        lambda status: mlflow.end_run(ends[status]),
    )


def _open_wandb(folder: str, _step: int) -> Sink:
    wandb: Any = import_module("wandb")
    run = wandb.init(id=_hash_path(folder), name=_name_run(folder), dir=folder, resume="allow")
    return Sink(
        lambda step, numbers: run.log({**numbers, "step": step}),
        lambda status: run.finish(exit_code=1 if status == "failed" else 0),
    )


#: By the name that `log_to` has, which is also that of the package: from the run folder's absolute path, and the step
#: that the run resumes from.
SINKS: dict[str, Callable[[str, int], Sink]] = {
    "tensorboard": _open_tensorboard,
    "mlflow": _open_mlflow,
    "wandb": _open_wandb,
}


def choose_sinks(given: Sequence[str] | None, env: Mapping[str, str]) -> tuple[str, ...]:
    """The names of the sinks: `log_to`, else HPCDDP_LOG_TO with commas between the names.

    RequestError for an unknown one and one whose package is not installed; nothing is imported for the others.
    """
    where = "HPCDDP_LOG_TO" if given is None else "log_to"
    names = given if given is not None else [name.strip() for name in env.get("HPCDDP_LOG_TO", "").split(",")]
    chosen = tuple(dict.fromkeys(name for name in names if name))
    for name in chosen:
        if name not in SINKS:
            raise RequestError(
                f"{where}: {name!r} is unknown{nearest(name, list(SINKS))}", f"one of {', '.join(SINKS)}"
            )
        if find_spec(name) is None:
            raise RequestError(
                f"{where}: {name} is not installed for {sys.executable}", f"{sys.executable} -m pip install {name}"
            )
    return chosen


class Sinks:
    """All sinks of a run. A sink that fails is named once and left out: no training ends for it."""

    def __init__(self, names: Sequence[str] = (), folder: str = "", step: int = 0) -> None:
        self._open: dict[str, Sink] = {}
        for name in names:
            with self._spared(name):
                self._open[name] = SINKS[name](os.path.abspath(folder), step)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write these numbers after `step` steps."""
        for name, sink in list(self._open.items()):
            with self._spared(name):
                sink.write(step, numbers)

    def close(self, status: str) -> None:
        """The attempt is over; `status` is finished, unfinished or failed."""
        for name, sink in list(self._open.items()):
            with self._spared(name):
                sink.close(status)
        self._open.clear()

    @contextmanager
    def _spared(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._open.pop(name, None)
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            print(f"hpcddp: warning: {name} failed and gets no more numbers ({reason})", file=sys.stderr, flush=True)


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
        """`interval_s` and `deadline` are those of `Progress`; `sinks` are names of `choose_sinks`."""
        self._setup, self._metrics, self._pace, self._names = setup, metrics, pace, sinks
        self._is_first = setup.group.is_first
        self._sinks = Sinks()
        out = sys.stderr if self._is_first else None
        self._progress = Progress(out, interval_s=interval_s, deadline=deadline)
        self._began = time.monotonic()
        self._samples: int | None = None  # of this attempt's steps but the first, which the pace does not count either
        self._is_open = False  # between the first line and the summary

    def start(self, plan: str, resumed_from: int | None) -> None:
        """The run's objects are there, from this step's checkpoint or new: print that, and open the sinks."""
        self._is_open = True
        folder = self._setup.folder
        words = [f"global batch: {plan}", self._setup.group.describe()]
        if resumed_from is not None:
            words.append(f"resumed from step {resumed_from}")
        if folder is None:
            words.append("no run folder: nothing is saved")
        elif self._is_first:
            self._sinks = Sinks(self._names, folder.run.path, resumed_from or 0)
        self.print_line("; ".join(words))

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
        """See `Progress.step`."""
        self._samples = 0 if self._samples is None else self._samples + samples
        self._progress.step(step, samples, loss)

    def log(self, step: int, numbers: Mapping[str, object]) -> None:
        """The caller's numbers. RequestError, on every rank, for what is no number."""
        checked = check_logged(numbers)
        self._metrics.log(step, checked)
        self._sinks.write(step, checked)

    def print_line(self, text: str) -> None:
        """Print a line of hpcddp's on rank 0."""
        if self._is_first:
            print(f"hpcddp: {text}", file=sys.stderr, flush=True)

    def end(
        self,
        steps: int,
        epoch: int,
        stop_reason: str | None,
        finish_reason: str | None,
        loss: float | None,
        weights: str | None,
    ) -> None:
        """The attempt is over, without an error: close the sinks and print the summary, once. `stop_reason` None: the
        run is finished, and `finish_reason` says why before its last step; `weights`: their digest, in words."""
        if not self._is_open:
            return
        self._is_open = False
        status = "finished" if stop_reason is None else "unfinished"
        self._sinks.close(status)
        if stop_reason is not None:
            # the launcher may have handed on another signal than the one that was sent, which state.json names
            status += f" ({'a signal' if stop_reason.startswith('SIG') else stop_reason})"
        elif finish_reason:
            status += f" early ({finish_reason})"
        training_s = self._pace.training_s
        rate = f"{self._samples / training_s:,.0f} samples/s, " if self._samples and training_s else ""
        rows = {
            "loss": loss is not None and f"{loss:.6g} in the last step",
            "speed": f"{rate}{format_duration(time.monotonic() - self._began)} in all",
            "weights": weights,
        }
        title, folder = "training", self._setup.folder
        if folder is not None and self._is_first:
            title = f"run {os.path.basename(os.path.abspath(folder.run.path))}"
            rows |= {"saved": next(reversed(list_checkpoints(folder.run.checkpoints)), None), "files": folder.run.path}
            rows["resume"] = stop_reason is not None and "the same command again"
        lines = [f"  {name:<9} {text}" for name, text in rows.items() if text]
        self.print_line("\n".join([f"{title}: {status} after step {steps}, epoch {epoch}", *lines]))

    def fail(self) -> None:
        """The attempt is over with an error, which the caller prints."""
        self._is_open = False
        self._sinks.close("failed")
