"""The loops over `rt.epochs` and `rt.batches`: what is left of a run, and what happens between its epochs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from hpcddp.training.data.randomness import seed_generators
from hpcddp.training.loop import TrainingLoop
from hpcddp.training.objects import Models, TrainingData
from hpcddp.training.remarks import find_empty_ranks, print_warning
from hpcddp.training.report import Report
from hpcddp.training.saves import Saves
from hpcddp.training.setup import RunSetup
from hpcddp.training.steps import StepRecord
from hpcddp.training.stopping import STEPS_UNTIL_AGREED, StopTraining


class Epochs:
    """Iterates over what is left of the run. A loop that the script leaves has finished early: by `break`, by `return`,
    or by an exception that it catches behind it. Python tells these three apart for nobody."""

    def __init__(
        self,
        setup: RunSetup,
        loop: TrainingLoop,
        saves: Saves,
        record: StepRecord,
        report: Report,
        models: Models,
        data: TrainingData,
    ) -> None:
        self._seed, self._is_first = setup.options.seed, setup.group.is_first
        self._loop, self._saves, self._record, self._report = loop, saves, record, report
        self._models, self._data = models, data
        self._open: str | None = None  # the loop that is open, or was left, in words

    def epochs(self, count: int) -> Iterator[int]:
        """See `Runtime.epochs`."""
        saves, loop, sampler = self._saves, self._loop, self._data.loader.sampler
        self._begin("epochs", count, sampler.epoch)
        while (epoch := sampler.epoch) < count and not saves.is_ending:
            saves.open_epoch = loop.epochs.body = epoch
            self._open = f"the loop left epoch {epoch + 1} of {count}"
            batch = sampler.plan.global_batch
            self._report.expect(saves.steps, count - epoch, sampler.length, sampler.position, batch)
            seed_generators("epoch", self._seed, epoch)
            try:
                yield epoch
            except GeneratorExit:
                saves.is_left = True
                raise
            finally:
                loop.epochs.body = None
            loop.check_caught()
            loop.epochs.check_read(stepped=loop.has_stepped or epoch + 1 == count)
            self.end_steps()
            steps = 0 if epoch + 1 == count else STEPS_UNTIL_AGREED
            saves.agree_to_go_on(f"ended epoch {epoch + 1} of {count}", steps)
            self._close()
            saves.pace.tail_ended(early=sampler.epoch == epoch)
            sampler.end_epoch(epoch)
            for second in self._data.seconds:
                second.epoch_ends()
            if saves.is_due_at_end:
                saves.save_now()
        saves.leave_if_stopping()

    def batches(self, count: int) -> Iterator[Any]:
        """See `Runtime.batches`."""
        saves, loop, loader = self._saves, self._loop, self._data.loader
        self._begin("batches", count, saves.steps)
        self._report.expect_steps(count)
        saves.last_step = count
        while saves.steps < count and not saves.is_ending:
            saves.open_epoch = loader.sampler.epoch
            self._open = f"the loop left rt.batches({count})"
            for batch in loader:
                try:
                    yield batch
                except GeneratorExit:
                    saves.is_left = True
                    raise
                if saves.steps + 1 == count:
                    break
            loop.check_caught()
            if loop.inside:
                saves.in_tail_of_last(loop.step_ends)
                loop.seed_between()
        saves.last_step = None
        self._close()
        if not saves.is_finished and saves.is_due_at_end:
            saves.agree_to_go_on(f"ended rt.batches({count})", 0)
            saves.save_now()
        saves.leave_if_stopping()

    def _begin(self, unit: str, count: int, over: int) -> None:
        saves, loop, plan = self._saves, self._loop, self._data.plan
        loop.settle()  # of a loop before, which was left in a step
        saves.open_again("steps" if unit == "batches" else unit, count)
        if not saves.is_ending:
            loop.epochs.check_count(unit, count, over)
        assert plan is not None
        print_warning(
            find_empty_ranks(self._models.whole, plan, self._data.loader.sampler.length), is_first=self._is_first
        )
        saves.checkpointer.check_untouched(is_finished=saves.is_finished)
        saves.agree(f"began the loop over rt.{unit}()")

    def _close(self) -> None:
        self._open, self._saves.open_epoch, self._saves.in_tail = None, None, False

    def end_steps(self) -> None:
        """In the tail of an epoch: if the loop left its batches by `break`, the step before is counted only now."""
        self._saves.in_tail_of_last(self._loop.settle)

    def finish(self) -> str | None:
        """The `with` body has ended without an error: the last numbers, the last checkpoint. Returns the reason to stop
        here; None: the run is finished."""
        saves, loop, data = self._saves, self._loop, self._data
        loop.check_caught()
        with suppress(StopTraining):
            loop.settle()
        loop.check_trained()
        saves.agree("ended the `with` body")
        self._record.catch_up(data.first.weighing if data.first is not None else None)
        for loader in data.loaders:
            loader.close()
        saves.check_state(at_end=True)
        saves.save_now()
        saves.finish_reason = saves.finish_reason or self._open
        # of the one epoch that a loop outside of rt.epochs makes, all is done
        return None if saves.in_tail and saves.open_epoch is None else saves.stop_reason
