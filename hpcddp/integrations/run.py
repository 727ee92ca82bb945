"""One attempt at a run whose loop and checkpoint files are a framework's: when to stop, what is saved, the state."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from hpcddp.errors import LaunchError, RequestError
from hpcddp.integrations.ranks import Ranks, join_ranks
from hpcddp.integrations.saved import (
    FrameworkCheckpoint,
    check_world,
    complete_checkpoint,
    find_saved,
    make_partial,
    name_partial,
)
from hpcddp.runs.folder import AttemptFolder
from hpcddp.runs.jsonfile import SchemaError
from hpcddp.runs.lock import HeldError
from hpcddp.runs.metrics import MetricsFile
from hpcddp.runs.start import end_script, opening_once
from hpcddp.runs.state import open_attempt, read_finish, write_failure
from hpcddp.training.activity import at_files
from hpcddp.training.arguments import SaveEvery
from hpcddp.training.checkpoint.checkpointer import AttemptSaves
from hpcddp.training.checkpoint.resume import set_aside
from hpcddp.training.checkpoint.settings import RunSettings
from hpcddp.training.stopping import SAVE, STOP_FLAGS, SignalFlag, StopTraining, StopWatch, read_deadline
from hpcddp.training.watchdog import beating
from hpcddp.uncaught import two_lines

_FIRST_SAVE_S = 30.0  # until one is measured
_LINES_S = 1.0  # between two lines on how far the loop is


class Run:
    """A framework's run, as its ranks handle it. Every method is called on every rank alike."""

    def __init__(
        self,
        framework: str,
        attempt: AttemptFolder,
        ranks: Ranks,
        env: Mapping[str, str],
        signals: SignalFlag,
        saved: FrameworkCheckpoint | None,
        *,
        global_batch: int | None = None,
        keep: int = 2,
        save_every: SaveEvery,
    ) -> None:
        self.ranks = ranks
        self.attempt = attempt
        self.saved = saved  # what the run resumes from
        self.step = saved.step if saved else 0  # optimizer steps over all attempts
        self.epoch = saved.epoch if saved else 0
        self.global_batch = global_batch
        self._framework = framework
        self._env = env
        self._signals = signals
        self._watch = StopWatch(signals, read_deadline(env))
        self._keep = keep
        self._save_every = save_every
        self._saves = AttemptSaves(attempt, self._watch, is_first=ranks.is_first, every_s=save_every.seconds)
        self._has_requested = False
        self._saved_at = (self.step, self.epoch)
        self._metrics = MetricsFile(None)
        self._written = (0.0, self.step)  # when the metrics last had a line, and of which step
        self._was_finished = False
        self._planned: dict[str, int] | None = None
        self._until_end = ExitStack()
        self._save_began = time.monotonic()
        self._framework_save = self._until_end.enter_context(ExitStack())  # the framework's, in a way of its own

    def open(self) -> None:
        """The ranks are there, and what `saved` says was loaded, or will be. RequestError if they have not all found
        the same checkpoint; LaunchError if this process has trained in the run before."""
        self._until_end.enter_context(opening_once(self.attempt.run))
        pulse = self._until_end.enter_context(beating(self._env))
        pulse.follow(lambda: self.step, self._watch.move_deadline)
        self._was_finished = read_finish(self.attempt.run) is not None
        _, found = self.ranks.agreement.agree("open the run", (self.step, os.uname().nodename))
        (least, there), (most, here) = min(found), max(found)
        if least != most:
            raise RequestError(
                f"the ranks found different checkpoints: of step {least} on {there}, and of step {most} on {here}",
                f"the run folder {self.attempt.run.path} has to be the same on every node",
            )
        if self.ranks.is_first:
            open_attempt(self.attempt)
            set_aside(self.saved.damaged if self.saved is not None else {})
            self._metrics = self._until_end.enter_context(MetricsFile(self.attempt.metrics))
        self._written = (time.monotonic(), self.step)
        self._watch.pace.expect_save(_FIRST_SAVE_S if self.saved is None else self.saved.seconds)
        if self.saved is not None:
            self.print_line(f"resumed from step {self.step}: {self.saved.path}")
        self._watch.pace.step_began()
        self._saves.begin_training()

    @property
    def stop_reason(self) -> str | None:
        """Why the run stops here, to be resumed; set on all ranks at the same step."""
        return self._saves.stop_reason

    def forget_stop(self) -> None:
        """The loop has come to its end all the same."""
        self._saves.stop_reason = None

    def compare_settings(self, **values: Any) -> None:
        """Compare the command, its files and these values, None: not known, with what was recorded when the run began,
        and record them. Before the first step. RequestError, on every rank, for differences."""
        agree = self.ranks.agreement.agree
        settings = RunSettings(
            lambda value: agree("compare the settings", value)[1][0],
            self.attempt,
            self._env,
            is_first=self.ranks.is_first,
            can_keep=False,
        )
        for name, value in values.items():
            settings.add(name, value)
        settings.compare({}, self.step if self.saved else None)
        settings.record(is_finished=self._was_finished)

    def print_line(self, line: str) -> None:
        """Print a line on rank 0, to stderr."""
        if self.ranks.is_first:
            print(f"hpcddp: {line}", file=sys.stderr, flush=True)

    def count_step(self, step: int, epoch: int = 0) -> bool:
        """The optimizer has made step number `step`; whether the loop ends here, to be resumed."""
        self._framework_save.close()  # one that did not come about
        self._save_began = time.monotonic()
        self.step, self.epoch = step, epoch
        if time.monotonic() - self._written[0] >= _LINES_S:
            self._write_line("at")
        self._watch.pace.step_ended()
        flags = self._watch.flags()
        timer = self._saves.timer
        if timer is not None and timer.is_due and not self._has_requested:
            self._has_requested = True  # the others hear it one step late
            flags += (SAVE,)
        self._saves.accept_stop(self.ranks.exchange(step, flags))
        return self.stop_reason is not None

    def expect_steps(self, total: int) -> None:
        """The training has so many optimizer steps, over all attempts."""
        self._planned = {"steps": total}
        self._metrics.write("expect", total_steps=total)

    def record_loss(self, loss: float, lr: float | None = None) -> None:
        """The framework has logged this loss after the step that was counted last."""
        self._write_line("step", loss=loss, lr=lr)

    def _write_line(self, kind: str, **numbers: float | None) -> None:
        """A line of the metrics, which `status`, `watch` and a sweep's best read. A disk that is full ends no training
        that its framework goes on with."""
        began, before = self._written
        now, batch = time.monotonic(), self.global_batch
        self._written = now, self.step
        speed = batch * (self.step - before) / (now - began) if batch and now > began and self.step > before else None
        with suppress(OSError):
            self._metrics.write(kind, step=self.step, epoch=self.epoch, samples_per_s=speed, **numbers)

    @property
    def is_save_due(self) -> bool:
        """Whether `save_every` asks for a checkpoint after this step, which was counted; the same on every rank. A step
        that is saved already is not saved again."""
        if self._save_every.steps is not None:
            return self.step % self._save_every.steps == 0
        return SAVE in self.ranks.agreement.requested and self._saved_at[0] < self.step

    @contextmanager
    def saving(self, step: int, epoch: int = 0) -> Iterator[Path]:
        """Every rank saves into the folder; the checkpoint is there once all have left the body. HeldError on rank 0,
        as `check_held`."""
        began = time.monotonic()
        self._begin_save(step)
        self.ranks.wait()
        with at_files():
            yield name_partial(self.attempt, step)
        self._end_save(step, epoch, began)

    def save_began(self) -> None:
        """The framework begins to save, in a way of its own."""
        self._save_began = time.monotonic()
        self._watch.pace.save_began()
        self._framework_save.close()
        self._framework_save.enter_context(at_files())

    def framework_saved(self, path: str, step: int, epoch: int) -> None:
        """The framework has saved to `path`, on this rank; the checkpoint counts once all ranks say so."""
        self._framework_save.close()
        self._begin_save(step)
        self._end_save(step, epoch, self._save_began, path=os.path.abspath(path))

    def _begin_save(self, step: int) -> None:
        self._saves.save_begins()
        if self.ranks.is_first:
            make_partial(self.attempt, step)

    def _end_save(self, step: int, epoch: int, began: float, **more: str) -> None:
        """Record that this rank has written; the checkpoint is complete once all have. `more`: for the manifest."""
        self.ranks.wait()
        self._saves.check_held()  # the writing may have taken minutes
        if self.ranks.is_first:
            entries = {"step": step, "epoch": epoch, "framework": self._framework, "global_batch": self.global_batch}
            entries |= {"world_size": self.ranks.world_size, "seconds": time.monotonic() - began}
            complete_checkpoint(self.attempt, step, self._keep, entries | more)
        self.ranks.wait()
        self._has_requested = False
        self.ranks.agreement.requested.clear()
        self._saved_at = step, epoch
        self._saves.record_saved(step, epoch, time.monotonic() - began)
        self._saves.save_returns()

    def finish(self) -> None:
        """The loop has ended without an error."""
        self.ranks.leave()
        if self._written[1] < self.step:
            self._write_line("at")
        if self.stop_reason:
            self._saves.end(*self._saved_at, self.stop_reason)
            self.print_line(
                f"stopped after step {self.step} ({self.stop_reason}): unfinished, saved at step {self._saved_at[0]}"
            )
        else:
            self._saves.end(self.step, self.epoch, None, asked=self._planned)
        self.ranks.wait()  # rank 0 has written before any rank ends
        if self.stop_reason in STOP_FLAGS:
            self._signals.obey()
        self._until_end.close()

    def fail(self, error: BaseException) -> None:
        """Record that this rank ends by an error: the first one that fails writes it to the state."""
        self._until_end.close()
        if isinstance(error, HeldError | SchemaError):  # the state of another attempt, or of another hpcddp, stays
            return
        what = f"{type(error).__name__}: {error}".partition("\n")[0]
        if self.ranks.is_first_to_fail(what):
            with suppress(OSError, LaunchError):
                reason = f"rank {self.ranks.rank}: {what}"
                write_failure(self.attempt, reason, step=self._saved_at[0], epoch=self._saved_at[1])


@contextmanager
def ended(run: Run) -> Iterator[None]:
    """Around the framework's loop: how it ended goes into the state."""
    try:
        with suppress(StopTraining):
            yield
        run.finish()
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            run.finish()
        else:
            run.fail(error)
        raise


@contextmanager
def opened(
    framework: str,
    attempt: AttemptFolder,
    env: MutableMapping[str, str],
    opened_by: str,
    *,
    global_batch: int | None,
    keep: int,
    save_every: SaveEvery,
    fixed: str = "",
    **compared: Any,
) -> Iterator[Run]:
    """The run, around a framework's loop whose process group is there. `fixed` as in `check_world`; `compared`: more
    for `compare_settings`. SystemExit where the run has stopped: what follows is for a model whose training is
    finished."""
    signals = SignalFlag()
    with signals.installed():
        with two_lines():
            ranks = join_ranks(env, opened_by)
            saved = find_saved(attempt.run, framework)
            line = check_world(saved, ranks.world_size, global_batch, fixed=fixed) if saved else None
        run = Run(
            framework, attempt, ranks, env, signals, saved, global_batch=global_batch, keep=keep, save_every=save_every
        )
        with ended(run):
            with two_lines():
                run.open()
                run.compare_settings(global_batch=global_batch, **compared)
            if line:
                run.print_line(line)
            yield run
    if run.stop_reason:
        end_script("hpcddp: the script ends here" if ranks.is_first else "", 0)
