"""Helpers for a training loop. Loop, model and optimizer stay the user's own; `hpcddp.runtime` shows such a loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

from hpcddp.batchplan import BatchPlan
from hpcddp.runs.metrics import MetricsFile
from hpcddp.runs.state import AT_ITS_END
from hpcddp.training.arguments import read_epochs
from hpcddp.training.checkpoint.checkpointer import Checkpointer
from hpcddp.training.data.randomness import seed_generators
from hpcddp.training.data.sampler import MicroBatch
from hpcddp.training.gate.dropped import DroppedBatches
from hpcddp.training.gradient.gradients import Gradients
from hpcddp.training.leaving import is_left_by_exception
from hpcddp.training.loop import TrainingLoop
from hpcddp.training.remarks import find_empty_ranks, print_warning
from hpcddp.training.report import Report
from hpcddp.training.setup import RunSetup
from hpcddp.training.stepping import Stepping
from hpcddp.training.steps import StepRecord
from hpcddp.training.stopping import FINISH, STOP, StopTraining, StopWatch
from hpcddp.training.summary import Summary


class Runtime(Stepping):
    """The value of `hpcddp.runtime()`: one per training run."""

    def __init__(
        self,
        setup: RunSetup,
        gradients: Gradients,
        watch: StopWatch,
        metrics: MetricsFile,
        report: Report,
        planned: Callable[[BatchPlan], None],
        until_end: ExitStack,
    ) -> None:
        record = StepRecord(setup, gradients, metrics)
        dropped = DroppedBatches(is_first=setup.group.is_first)
        checkpointer = Checkpointer(setup, watch)
        loop = TrainingLoop(
            setup.options.seed, gradients, record, watch.pace, self._count_step, lambda: self._is_ending, dropped
        )
        loop.gate.is_first = setup.group.is_first
        super().__init__(setup, gradients, loop, checkpointer, report, planned, until_end)
        loop.begins = checkpointer.check_untouched
        self.metrics = metrics
        self.weights_sha256: str | None = None  # of the tracked models at the end, on rank 0
        self._watch, self._record = watch, record
        loop.epoch_is_read = self._is_finished
        self._finish_reason = None if setup.over in {"", AT_ITS_END} else setup.over  # it finished early
        until_end.callback(loop.close)
        until_end.enter_context(loop.caught.noted())

    # ---- what is so

    @property
    def epoch(self) -> int:
        """The epoch that the next step belongs to, from 0."""
        return self._loader.sampler.epoch if self._loader is not None else 0

    @property
    def stopping(self) -> bool:
        """Whether the loop ends here; a later attempt resumes it."""
        return self.stop_reason is not None

    @property
    def _is_ending(self) -> bool:
        return self.stopping or self._finish_reason is not None or self._is_finished

    # ---- the loop

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are left of `count`, which counts from the start of the run: two more after `rt.epochs(3)`
        are `rt.epochs(5)`. Leaving the inner loop early skips the rest of its epoch.

        If the run has to stop before its end, the `with` body is left from here or from the loop over the loader. An
        epoch that a stop left after its last step is given again, without batches: what follows them is still to do. A
        loop that `break` or `return` leaves has finished early; `stop` or an exception leaves it unfinished.
        """
        count, sampler, loop = read_epochs(count), self._need_loader().sampler, self._loop
        loop.settle()  # of a loop before, which was left in a step
        is_first = loop.epochs.are_new
        if not self._is_ending:
            loop.epochs.check_count(count, sampler.epoch)
        print_warning(find_empty_ranks(loop.models, self.plan, sampler.length), is_first=self.is_main)
        self._checkpointer.check_untouched()
        self._agree("began the loop over rt.epochs()")
        loop.epoch_is_read = is_first and loop.open_epoch is not None and loop.open_epoch < sampler.epoch
        while (epoch := sampler.epoch - loop.epoch_is_read) < count and not self._is_ending:
            loop.open_epoch = loop.epochs.body = epoch
            self._broken_off = None
            self._left = f"the loop left epoch {epoch + 1} of {count}"
            left = count - sampler.epoch
            self._report.expect(self.steps, left, sampler.length, sampler.position, self.plan.global_batch)
            seed_generators("epoch", self.seed, epoch)
            try:
                yield epoch
            except GeneratorExit:
                self._loop_was_left = True
                if is_left_by_exception():
                    self._broken_off = "inside a step" if loop.inside else "between steps"
                raise
            finally:
                loop.epochs.body = None
            loop.caught.check()
            loop.epochs.check_read(stepped=loop.gate.asked or epoch + 1 == count)
            self._body_has_ended = True  # if the loop left its batches by `break`, the step before is counted only now
            loop.settle()
            self._body_has_ended = False
            self._agree(f"ended epoch {epoch + 1} of {count}")
            self._left = None
            loop.open_epoch, loop.epoch_is_read = None, False
            self._report.clear()
            self._watch.pace.epoch_ended()
            sampler.end_epoch(epoch)
            if self._options.saves_at_epoch_ends or self._save_asked:
                self._save_now()
        self._leave_if_stopping()

    def _count_step(self, micro: MicroBatch) -> None:
        """A global batch is over and its optimizer step made: count it, exchange flags, save or stop if it is time."""
        epoch, loader = self.epoch, self._need_loader()
        loader.sampler.advance(micro.total)
        left = loader.sampler.steps_left
        self._watch.pace.step_ended(last=left == 0)
        stop = self._record.end_step(
            loader.weighing,
            lambda: self._watch.flags(left) + self._agreement.flags,
            samples=micro.total,
            agree=left <= 1,  # before the end of the epoch, which may take long
            step=self.steps,
            epoch=epoch,
            lr=self._checkpointer.learning_rate(),
        )
        self._watch.pace.steps_shared = self._record.steps_shared
        self._report.step(self.steps, micro.total, self._record.loss)
        self.stop_reason = self.stop_reason or stop
        self._ask_if_due()
        if not self._body_has_ended and self._agreement.is_due(self.steps, self._record.sums, self._record.exchanged):
            self._agree(f"ended step {self.steps}")
        self._check_first_steps()
        every = self._options.save_every.steps
        self._save_asked |= self._is_ending or (every is not None and self.steps % every == 0)
        if self._body_has_ended:
            return
        if self._save_asked:
            self._save_now()
        self._checkpointer.poll(self.stop_reason, wait=self._is_ending)
        self._leave_if_stopping()

    def _leave_if_stopping(self) -> None:
        if self.stopping:
            raise StopTraining

    def stop(self, reason: str) -> None:
        """Leave the `with` body after this step; a later attempt resumes it.

        One rank is enough. Inside a step the others hear of it a step later (of steps that take less than 25 ms up to
        16 steps later), and all stop there; if every rank calls it at the same step, all stop after that step.
        """
        self._ask(STOP, reason)

    def finish_early(self, reason: str) -> None:
        """End the loop after this step; the run is finished. Called as `stop` is."""
        self._ask(FINISH, reason)

    # ---- the end

    def finish(self) -> None:
        """The body has ended without an error: last numbers, last checkpoint, state.json. `open_runtime` calls it."""
        self._loop.caught.check()
        whole = self._broken_off != "inside a step"  # else an optimizer may have moved some of the weights
        with suppress(StopTraining):
            if whole:
                self._loop.settle()
        if whole:
            self._loop.check_trained()
        self._agree("ended the `with` body")
        stop = self._record.catch_up(self._loader.weighing if self._loader is not None else None)
        self.stop_reason = self.stop_reason or stop
        if self._loader is not None:
            self._loader.close()
        self._check_state(at_end=True)
        if self._broken_off and self._left and not self._finish_reason:
            self.stop_reason = self.stop_reason or f"{self._left} by an exception"
        if whole:
            self._save_now()
        self._finish_reason = self._finish_reason or self._left  # by `break` or `return`
        self.weights_sha256 = self._checkpointer.finish(
            self.stop_reason, step=self.steps, epoch=self.epoch, finished=self._finish_reason
        )
        self._report.end(
            Summary(
                self.steps,
                stop_reason=self.stop_reason,
                finish_reason=self._finish_reason,
                epochs=self.epoch,
                loss=self._record.loss,
                weights_sha256=self.weights_sha256,
                is_exact=self.exact,
            )
        )
